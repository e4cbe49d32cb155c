"""A ramp's pure parts: sizes, chunks out of step records, bands, what ends it, time left, the files of a report."""
from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tightrank.adapter import line
from tightrank.errors import ConfigError
from tightrank.verify import store
from tightrank.verify.plots import Line, plot, ticks
from tightrank.verify.progress import Bar, duration, fitted, forecast, seconds
from tightrank.verify.ramp import (
    PUBLISHED_TOKENS,
    Chunk,
    Outcome,
    Ramp,
    Size,
    bands,
    chain,
    judged,
    parse_sizes,
    peaks,
    shared,
    sizes_for,
    verdict,
)
from tightrank.verify.report import markdown
from tightrank.verify.target import NotThere, Target, differences, find, token_range, trouble

GIB = 1 << 30


# --- sizes ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("text", "sizes"), [
    ("64k,128k", (64_000, 128_000)), ("64K", (65_536,)), ("1,2,3", (1, 2, 3)), (" 512 , 1M ", (512, 2**20)),
    ("2m", (2_000_000,))])
def test_sizes_are_read_as_the_engines_read_their_own(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "64k,", "0", "-5", "64q", "128k,64k", "64k,64k", "1.5k", "9999999999", "0x10", "1e5"])
def test_other_sizes_are_refused_with_what_was_written(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"'{text.rpartition(',')[2]}'") + "|each size must be longer"):
        parse_sizes(text)


def test_the_published_sizes_shrink_with_the_longest_prompt() -> None:
    assert sizes_for(None, None) == sizes_for(None, 512_000) == PUBLISHED_TOKENS
    assert sizes_for(None, 50_000) == (6_400, 12_800, 20_000, 25_600, 40_000, 50_000)
    assert sizes_for(None, 3) == (1, 2, 3)
    assert sizes_for((10, 20), 20) == (10, 20)
    with pytest.raises(ValueError, match=r"21 tokens are more than the longest prompt here, 20; name sizes up to 20"):
        sizes_for((10, 21), 20)


@given(st.integers(1, 2**30))
def test_scaled_sizes_grow_and_end_at_the_longest(longest: int) -> None:
    sizes = sizes_for(None, longest)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == min(longest, PUBLISHED_TOKENS[-1])


# --- chunks -----------------------------------------------------------------------------------------------------------

def step(number: int, *chunks: tuple[int, int], rank: int = 0, peak: int | None = None) -> dict[str, Any]:
    return {"id": number, "rank": rank, "monotonic_ns": number * 100_000_000, "milliseconds": 10.0, "peak_bytes": peak,
            "chunks": [list(chunk) for chunk in chunks]}


def test_the_chunks_of_a_prompt_are_found_among_those_of_others() -> None:
    """A health check begins like it, another prompt ends elsewhere, a second rank tells the same."""
    steps = [step(1, (0, 4)), step(2, (0, 64)), step(2, (0, 64), rank=1), step(3, (64, 64), (0, 7)), step(4, (0, 64)),
             step(5, (128, 30)), step(6, (0, 500))]
    chunks = chain(steps, 158)
    assert [(chunk.prefix, chunk.tokens) for chunk in chunks] == [(0, 64), (64, 64), (128, 30)]
    assert [round(chunk.seconds, 3) for chunk in chunks] == [0.01, 0.1, 0.2], "the first one's own, then from step to step"
    assert shared(steps, chunks) == 1


def test_a_prompt_that_was_stopped_has_the_chunks_that_it_came_to() -> None:
    assert [chunk.prefix for chunk in chain([step(1, (0, 64)), step(2, (64, 32))], 1000)] == [0, 64]
    assert chain([], 10) == () and chain([step(1, (0, 64))], 10) == ()


def test_a_lost_record_leaves_the_end() -> None:
    assert [chunk.prefix for chunk in chain([step(1, (0, 64)), step(3, (128, 64)), step(4, (192, 8))], 200)] == [128, 192]


def test_a_prompt_that_was_computed_twice_counts_once() -> None:
    """Preempted for lack of KV: the last time is the one that was answered."""
    steps = [step(1, (0, 64)), step(2, (64, 64)), step(3, (0, 64)), step(4, (64, 64)), step(5, (128, 2))]
    assert [chunk.prefix for chunk in chain(steps, 130)] == [0, 64, 128]
    assert chain(steps, 130)[1].seconds == pytest.approx(0.1)


@given(st.integers(1, 40_000), st.integers(10**5, 10**8))
def test_a_whole_prompt_under_the_line_is_found_whole(tokens: int, budget: int) -> None:
    steps, prefix = [], 0
    while prefix < tokens:
        new = min(tokens - prefix, line.chunk_tokens(budget, prefix, minimum=64, maximum=2048, granule=64) or 64)
        steps.append(step(len(steps) + 1, (prefix, new)))
        prefix += new
    chunks = chain(steps, tokens)
    assert len(chunks) == len(steps) and sum(chunk.tokens for chunk in chunks) == tokens
    assert sum(band.tokens for band in bands(chunks)) == tokens


def test_peaks_are_per_rank() -> None:
    assert peaks([step(1, (0, 1), peak=5), step(2, (0, 1), peak=9), step(2, (0, 1), rank=1, peak=7), step(3, (0, 1))]) == {
        "rank 0": 9, "rank 1": 7}


def test_bands_end_at_powers_of_two_and_the_end_of_a_prompt_is_no_chunk_size() -> None:
    found = bands([Chunk(0, 1024, 1.0, None), Chunk(1024, 512, 1.0, None), Chunk(1536, 256, 1.0, None),
                   Chunk(1792, 9, 0.5, None)])
    assert [(band.name, band.tokens, band.seconds) for band in found] == [("0 - 1,024", 1024, 1.0), ("1,024 - 2,048", 777, 2.5)]
    assert (found[1].largest_chunk, found[1].smallest_chunk, found[1].rate) == (512, 256, 777 / 2.5)
    assert bands([Chunk(5000, 9, 0.0, None)])[0].rate is None


# --- whom to ask ------------------------------------------------------------------------------------------------------

def worker(**changes: Any) -> dict[str, Any]:
    return {"name": "w0", "role": "both", "engine": "vllm", "engine_version": "0.32.0", "phase": "up", "reason": "",
            "generation": 1, "address": "", "host": "0.0.0.0", "port": 8001, "served_model": "tiny",
            "longest_prompt_tokens": 8191, **changes}


def status(*workers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"workers": list(workers) or [worker()], "guard": {"floor_bytes": 5}, "floor_bytes": 4, "levels": [], **changes}


def found(state: dict[str, Any] | None = None, **asked: Any) -> Target:
    plan = {"workers": [{"name": "w0", "model": "/m", "argv": ["vllm"], "notes": ["measured anew at each start"]}]}
    return find(state or status(), plan, "http://10.0.0.7:9470", **{"worker": None, "endpoint": None, "gateway": None, **asked})


def test_requests_go_to_the_worker_itself_or_through_a_gateway_before_a_pair() -> None:
    assert found().url == "http://10.0.0.7:8001" and found().guard_floor_bytes == 5
    assert found(status(worker(host="::1"))).url == "http://[::1]:8001"
    assert found(status(worker(address="h"))).url == "http://h:8001"
    pair = status(worker(name="d", role="decode"), worker(role="prefill"))
    assert found(pair, gateway="http://g:8000").url == "http://g:8000"
    assert found(pair, gateway="http://g:8000", endpoint="http://e:1").url == "http://e:1"
    with pytest.raises(ConfigError, match="--endpoint"):
        found(pair)


@pytest.mark.parametrize(("state", "asked", "error", "says"), [
    (status(), {"worker": "w9"}, ConfigError, "--worker w9: takes no prompts here; those that do: w0"),
    (status(worker(role="decode")), {}, ConfigError, "those that do: none"),
    (status(worker(engine="atom")), {}, ConfigError, "ATOM takes prompts as text"),
    (status(worker(phase="failed", reason="kv-pool-too-small: x")), {}, NotThere, "w0 is failed: kv-pool-too-small: x")])
def test_a_worker_that_cannot_be_measured(state: Any, asked: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        found(state, **asked)


def test_two_targets_are_the_same_when_all_that_counts_is() -> None:
    before = found().identity()
    assert list(differences(before, found(status(worker(generation=7))).identity())) == []
    assert before["plan"] == {"argv": ["vllm"]}
    other = {**before, "plan": {**before["plan"], "argv": ["vllm", "--x"]}, "engine_version": "0.33.0"}
    assert list(differences(before, other)) == ["engine_version was 0.32.0 and is 0.33.0",
                                                "plan.argv had nothing more and has --x"]


@pytest.mark.parametrize(("model", "ids"), [
    ({}, (5, 250)), ({"vocab_size": 128}, (5, 250)), ({"vocab_size": "x"}, (5, 250)),
    ({"vocab_size": 128_000}, (32_000, 64_000)), ({"text_config": {"vocab_size": 1000}}, (250, 500)),
    ({"text_config": {}, "vocab_size": 1000}, (250, 500))])
def test_prompts_hold_no_special_tokens(model: dict[str, Any], ids: tuple[int, int]) -> None:
    assert token_range(model) == ids


def event(kind: str, sentence: str, worker: str | None = "w0", **data: Any) -> dict[str, Any]:
    return {"kind": kind, "worker": worker, "sentence": sentence, "data": data}


@pytest.mark.parametrize(("events", "state", "says"), [
    ([], status(), ""),
    ([event("level", "tighten is over", None, state="back")], status(), ""),
    ([event("decision", "raising the line's budget")], status(), ""),
    ([event("level", "tighten fires: host", None, state="fires")], status(), "tighten fires: host"),
    ([event("dry-run", "dry run: stop would", None)], status(), "dry run: stop would"),
    ([event("phase", "up -> stopping"), event("cause", "guard-floor: x")], status(), "guard-floor: x"),
    ([event("phase", "up -> draining")], status(), "w0: up -> draining"),
    ([], status(levels=[{"level": "shed", "in_force": True, "sentence": "host: 1 MiB"}]), "shed is in force: host: 1 MiB"),
    ([], status(worker(phase="starting", reason="loading")), "w0 is starting: loading"),
    ([], status(worker(generation=2)), "w0 was started anew (generation 2, was 1)"),
    ([], status(worker(name="w1")), "w0: the supervisor has it no more"),
    ([], None, "")])
def test_what_ends_a_ramp(events: list[dict[str, Any]], state: Any, says: str) -> None:
    assert trouble(events, state, found()) == says


# --- verdict, time left, files ----------------------------------------------------------------------------------------

def size(tokens: int, outcome: Outcome = Outcome.PASSED, why: str = "", **changes: Any) -> Size:
    chunks = tuple(Chunk(prefix, min(512, tokens - prefix), 0.25 + prefix / 10**5, 2 * GIB) for prefix in range(0, tokens, 512))
    values: dict[str, Any] = {
        "first_token_seconds": 2.5, "chunks": chunks, "memory": ((0.0, 9 * GIB), (1.0, 8 * GIB)),
        "peak_bytes": {"rank 0": 2 * GIB},
        "lowest_bytes": {"host": 9 * GIB, "guard": 8 * GIB, "rank 0": GIB}, "events": ("tighten fires | host",), **changes}
    return Size(tokens, outcome, why, 1, 1, 1e9, 3.0, **values)


def ramp(*sizes: Size, asked: tuple[int, ...] = (1000, 4000)) -> Ramp:
    return Ramp(1e9, found().identity(), 2 * GIB, GIB, asked, 4, sizes)


def test_memory_under_the_floor_is_a_failure_and_the_floor_itself_is_not() -> None:
    assert judged(2 * GIB, 2 * GIB) == (Outcome.PASSED, "") == judged(None, GIB)
    outcome, why = judged(2 * GIB - 1, 2 * GIB)
    assert outcome is Outcome.UNDER_FLOOR and "2GiB" in why


def test_the_memory_of_the_host_is_judged_and_not_that_of_a_device() -> None:
    assert size(1000).lowest == 8 * GIB and size(1000, lowest_bytes={"rank 0": 1}).lowest is None


def test_the_peaks_of_a_prompt_are_held_against_each_other() -> None:
    chunks = (Chunk(0, 1, 1.0, 5), Chunk(1, 1, 1.0, None), Chunk(2, 1, 1.0, 9))
    assert size(1000, chunks=chunks).rise_bytes == 4 and size(1000, chunks=chunks[1:2]).rise_bytes is None


def test_a_verdict_is_about_all_sizes() -> None:
    passed, sentence = verdict(ramp(size(1000), size(4000)))
    assert passed and "all 2 sizes up to 4k tokens passed, available memory never under 8.00 GiB" in sentence
    assert verdict(ramp(size(1000))) == (False, "not finished: 4k tokens are still to be done")
    failed = ramp(size(1000), size(4000, Outcome.GUARD_EVENT, "shed fires"))
    assert verdict(failed) == (False, "4k tokens: guard-event: shed fires") and failed.left == (4000,)


def test_the_time_of_a_prefill_is_found_again() -> None:
    chunks = [Chunk(prefix, 100, 100 * 0.002 + 100 * (prefix + 50) * 1e-7, None) for prefix in range(0, 5000, 100)]
    assert fitted(chunks) == pytest.approx((0.002, 1e-7))
    assert seconds(fitted(chunks), 5000) == pytest.approx(sum(chunk.seconds for chunk in chunks))
    assert fitted(chunks[:1]) == (pytest.approx(chunks[0].seconds / 100), 0.0) and fitted([]) == (0.0, 0.0)
    faster = [Chunk(0, 100, 1.0, None), Chunk(100, 100, 0.5, None), Chunk(200, 100, 0.1, None)]
    assert fitted(faster) == (pytest.approx(1.6 / 300), 0.0), "a negative term is no term"


def test_the_share_that_is_done_grows_to_all_of_it() -> None:
    assert forecast(ramp(), 1000, ()) == (0.0, None)
    half, left = forecast(ramp(size(1000)), 4000, size(2048).chunks)
    assert 0.2 < half < 0.9 and left is not None and left > 0
    assert forecast(ramp(size(1000)), 4000, size(4000).chunks) == (pytest.approx(1.0), pytest.approx(0.0))
    assert [duration(each) for each in (0.4, 61, 3725)] == ["0 s", "1 min 1 s", "1 h 2 min"]


def test_a_bar_is_one_line_that_is_drawn_anew() -> None:
    out = io.StringIO()
    bar = Bar(out)
    bar.begin(ramp(), 1000)
    bar.progress(size(512).chunks, 3 * GIB)
    bar.ended(ramp(size(1000)), size(1000))
    assert out.getvalue().count("\n") == 1 and out.getvalue().count("\r") == 3 and "512 of 1,000 tokens" in out.getvalue()


def test_a_report_comes_back_from_disk_as_it_was(tmp_path: Path) -> None:
    before = ramp(size(1000), size(4000, Outcome.UNDER_FLOOR, "low", first_token_seconds=None, chunks=(), memory=()))
    store.save(tmp_path, before)
    assert store.load(tmp_path) == store.load(tmp_path / "report.json") == before
    assert {path.name for path in tmp_path.iterdir()} == {"chunk.svg", "memory.svg", "rate.svg", "report.json", "report.md"}
    body = json.loads((tmp_path / "report.json").read_text())
    assert body["verdict"]["passed"] is False and body["sizes"][0]["bands"][0]["tokens"] == 1000
    assert body["sizes"][0]["tokens_per_second"] == 400


@pytest.mark.parametrize("text", [
    "", "{", "[]", "{}", '{"schema": 1, "kind": "ramp"}', '{"schema": 2, "kind": "ramp"}', "[" * 100_000, "\x00",
    '{"schema": 1, "kind": "ramp", "started_unix": "x"}',
    '{"schema": 1, "kind": "ramp", "started_unix": 1, "target": {}, "floor_bytes": 1, "guard_floor_bytes": 1, '
    '"sizes_tokens": [1], "answer_tokens": 1, "sizes": [{"tokens": 1}]}'])
def test_a_torn_or_foreign_report_is_named_and_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "report.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(file))):
        store.load(tmp_path)
    assert file.read_text() == text


def test_a_write_that_fails_leaves_the_old_report_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(tmp_path, ramp(size(1000)))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.save(tmp_path, ramp(size(1000), size(4000)))
    assert store.load(tmp_path) == ramp(size(1000))
    assert not list(tmp_path.glob(".*")), "no half of a new one"


def test_two_ramps_do_not_write_into_one_directory(tmp_path: Path) -> None:
    with store.held(tmp_path), pytest.raises(ConfigError, match="another ramp"), store.held(tmp_path):
        pass
    with store.held(tmp_path):
        pass


def test_a_report_says_what_passed_and_what_did_not() -> None:
    stopped = size(4000, Outcome.GUARD_EVENT, "shed fires", chunks=size(4000).chunks[:3], shared_steps=2)
    text = markdown(ramp(size(1000), stopped))
    assert "# Ramp of w0: not passed" in text and "4k tokens: guard-event: shed fires." in text
    assert "| 4k | guard-event |" in text and "3 (of tokens 0 to 1,536), 2 with other requests" in text
    assert "- 1k: tighten fires | host" in text
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 4 and all(len({row.count("|") for row in table}) == 1 for table in tables)
    assert "## Memory" not in markdown(ramp())
    blind = markdown(ramp(size(1000, Outcome.REFUSED, "it answered 400: too long.", chunks=())))
    assert "too long.\n" in blind and "| no records |" in blind and "## Chunks" not in blind and "## Memory" in blind


# --- plots ------------------------------------------------------------------------------------------------------------

@given(st.floats(1e-6, 1e12), st.integers(2, 10))
def test_ticks_are_round_few_and_within(most: float, about: int) -> None:
    found = ticks(most, about)
    assert found[0] == 0 and len(found) <= about + 1 and found[-1] <= most * (1 + 1e-9)


@pytest.mark.parametrize("lines", [[], [Line("a", [])], [Line("a", [(0, 0)])], [Line("a & <b>", [(0.0, 1.0), (5.0, 3.0)])],
                                   [Line("limit", [(0, 1), (1, 1)], True)],
                                   [Line(f"{n}k", [(x, x * n) for x in range(2000)]) for n in range(8)]])
def test_a_plot_is_whole_and_nothing_lies_outside(lines: list[Line]) -> None:
    root = ET.fromstring(plot("a <title>", "x & y", "y", lines))
    for found in root.iter("{http://www.w3.org/2000/svg}polyline"):
        points = [tuple(map(float, pair.split(","))) for pair in found.attrib["points"].split()]
        assert len(points) <= 401 and all(0 <= x <= 760 and 0 <= y <= 400 for x, y in points)


def test_large_numbers_are_written_short() -> None:
    text = plot("t", "x", "y", [Line("a", [(0, 0), (500_000, 2000)])])
    assert ">400k<" in text and ">2000<" in text


def test_the_plots_of_a_ramp_show_all_sizes(tmp_path: Path) -> None:
    store.save(tmp_path, ramp(size(1000), size(4000), replace(size(6000), chunks=())))
    for name, shown in (("rate.svg", 2), ("chunk.svg", 2), ("memory.svg", 5)):
        text = (tmp_path / name).read_text()
        ET.fromstring(text)
        assert text.count("<polyline") + text.count("<circle") == shown, name
