"""The chunk rule of vLLM's line, against its definition."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tightrank_adapter import line
from tightrank_adapter.vllm.chunk import Batch, Rules, grant

RULES = Rules(minimum=128, maximum=1024, granule=64, rule="span", step="granule")
rules = st.builds(lambda minimum, more, granule, rule, step: Rules(
    minimum * granule, (minimum + more) * granule, granule, rule, step),
    st.integers(1, 4), st.integers(0, 30), st.sampled_from([1, 16, 64, 96]), st.sampled_from(line.RULES),
    st.sampled_from(line.STEPS))
batches = st.tuples(st.integers(0, 10_000_000), st.just(0), st.just(0)) | st.tuples(
    st.integers(0, 10_000_000), st.integers(1, 2000), st.integers(1, 9000))


def under(rule: Rules, batch: Batch, prefix: int, tokens: int) -> bool:
    width = prefix + tokens if rule.rule == "span" else max(prefix, 1)
    return (batch[1] + tokens) * max(batch[2], width) <= batch[0]


@given(rules, batches, st.integers(0, 20_000), st.integers(1, 3000), st.integers(0, 20_000))
def test_a_chunk_keeps_the_batch_under_the_line_or_is_the_least_of_an_empty_step(
        rule: Rules, batch: Batch, prefix: int, offered: int, more: int) -> None:
    remaining = offered + more
    tokens = grant(rule, batch, prefix, offered, remaining)
    assert 0 <= tokens <= min(offered, rule.maximum)
    if tokens and not under(rule, batch, prefix, tokens):
        assert batch[1] == 0
        assert tokens <= rule.least
    if batch[1] == 0:
        assert tokens > 0
    if tokens not in (0, offered):
        assert tokens % rule.granule == 0  # no sliver but the end of a prompt and what the engine itself cut


@given(rules, batches, st.integers(0, 20_000), st.integers(1, 3000))
def test_a_chunk_is_the_schedules_or_the_rest_of_the_prompt(rule: Rules, batch: Batch, prefix: int, remaining: int) -> None:
    keywords = {"minimum": rule.minimum, "maximum": rule.maximum, "granule": rule.granule, "rule": rule.rule, "step": rule.step}
    scheduled = line.batch_chunk_tokens(batch[0], prefix, batch[1], batch[2], **keywords)
    if scheduled:
        assert grant(rule, batch, prefix, min(remaining, rule.maximum), remaining) == min(scheduled, remaining)


@pytest.mark.parametrize(("batch", "prefix", "offered", "remaining", "expected"), [
    ((1_500_000, 0, 0), 0, 1024, 5000, 1024),
    ((1_500_000, 0, 0), 1024, 1024, 3976, 768),      # 768 x 1792 <= B < 832 x 1856
    ((1_500_000, 0, 0), 4864, 136, 136, 136),        # the end: as it is
    ((1_500_000, 0, 0), 8000, 1024, 1300, 128),      # 179 would fit: two granules
    ((150_000, 0, 0), 8000, 1024, 1300, 128),        # over the line, and yet it must go on
    ((150_000, 0, 0), 8000, 100, 100, 100),          # over the line, and the end
    ((150_000, 128, 8128), 0, 500, 500, 0),          # left out: the step has rows already
    ((1_500_000, 768, 1792), 0, 256, 5000, 0),       # (768 + 128) x 1792 > B
    ((1_500_000, 300, 1792), 0, 70, 70, 70),         # a short prompt beside it
    ((1_500_000, 300, 1792), 0, 70, 5000, 70),       # what the engine's own limit leaves
    ((1_500_000, 300, 1792), 0, 15, 5000, 0),        # it leaves a sliver: not in this step
    ((1_500_000, 0, 0), 0, 15, 5000, 15),            # the same with an empty step
    ((1_500_000, 0, 0), 0, 40, 5000, 40),
])
def test_table(batch: Batch, prefix: int, offered: int, remaining: int, expected: int) -> None:
    assert grant(RULES, batch, prefix, offered, remaining) == expected


@pytest.mark.parametrize(("prefix", "offered", "rows", "expected"), [
    (2048, 1024, 0, 1024), (2048, 900, 0, 512),           # ends on a block of 512
    (2100, 460, 0, 460), (2100, 460, 100, 460),           # up to the next block, or
    (2100, 460, 900, 0),                                  # not in this step
])
def test_chunks_of_a_mamba_model_end_on_its_blocks(prefix: int, offered: int, rows: int, expected: int) -> None:
    aligned = Rules(512, 1024, 512, "span", "granule", block=512)
    assert grant(aligned, (3_200_000, rows, rows), prefix, offered, 9000) == expected
