"""Values as people write them."""
from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tightrank.config.units import Duration, ListOf, Size, Text, Whole, format_duration, format_size


@given(st.integers(0, 2**50))
def test_a_size_survives_being_written(size: int) -> None:
    assert Size().parse(format_size(size)) == size


@given(st.integers(0, 7 * 86_400_000))
def test_a_duration_survives_being_written(milliseconds: int) -> None:
    assert Duration().parse(format_duration(milliseconds / 1000)) == milliseconds / 1000


@given(st.integers(0, 10**15))
def test_a_count_survives_being_written(count: int) -> None:
    kind = Whole(0, 10**15)
    assert kind.parse(str(count)) == kind.parse(f"{count:_}") == count


@pytest.mark.parametrize(("text", "size"), [
    ("1.5GiB", 3 * 2**29), ("512MiB", 2**29), ("512 MiB", 2**29), ("1GB", 10**9), ("0B", 0), ("64kB", 64000)])
def test_sizes(text: str, size: int) -> None:
    assert Size().parse(text) == size


@pytest.mark.parametrize(("text", "seconds"), [("10s", 10.0), ("5m", 300.0), ("250ms", 0.25), ("1.5h", 5400.0)])
def test_durations(text: str, seconds: float) -> None:
    assert Duration().parse(text) == seconds


@pytest.mark.parametrize(("text", "count"), [
    ("2048", 2048), ("200_000_000", 200_000_000), ("2.0e8", 200_000_000), ("1e8", 100_000_000), ("2.5E+3", 2500), ("0", 0)])
def test_counts(text: str, count: int) -> None:
    assert Whole(0, 10**15).parse(text) == count


@pytest.mark.parametrize("text", ["", "1.5", "1.5gib", "GiB", "-1GiB", "1e3MiB", "1,5GiB", "1.0000000001B", "nan", "1:30"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        Size().parse(text)


@pytest.mark.parametrize("text", ["", "10", "10 seconds", "1:30", "-5s", "5M", "infs"])
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number with one of the units"):
        Duration().parse(text)


@pytest.mark.parametrize("text", ["", "0o10", "010", "0x10", "1.5", "1:30", "-1", "+1", "1e-3", "1.5e0", "nan", "yes", "_1"])
def test_no_counts(text: str) -> None:
    with pytest.raises(ValueError, match="must be a whole number"):
        Whole(0, 10**15).parse(text)


@pytest.mark.parametrize(("kind", "text", "message"), [
    (Whole(1, 65535), "65536", "must be between 1 and 65535"), (Whole(1, 65535), "0", "must be between 1 and 65535"),
    (Duration(1, 86400), "0.5s", "must be between 1s and 24h"), (Size(0, 2**50), "2000TiB", "must be between 0B and 1024TiB")])
def test_the_range_is_named(kind: Whole | Duration | Size, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        kind.parse(text)


def test_a_list_outside_the_file_is_written_with_commas() -> None:
    assert ListOf(Text()).parse("a,b") == ("a", "b")
    assert ListOf(Text()).parse("") == ()


@given(st.text(alphabet="0123456789_.eE+", max_size=12))
def test_the_schema_of_a_count_accepts_what_is_parsed(text: str) -> None:
    kind = Whole(0, 10**15)
    try:
        kind.parse(text)
    except ValueError:
        return
    assert re.search(kind.schema()["pattern"], text)
