"""The line's arithmetic: how many new tokens a prefill batch may take at a given prefix.

A prefill of T new rows over keys of length L+T makes engines hold transients of about c·T·(L+T) bytes (sparse-attention
indexers score every row against every key). The line is the token² budget B with T·(L+T) <= B. The unit of `budget` is
token², of everything else tokens. Pure, standard library only; the supervisor and the engines use this one copy.
"""
from math import isqrt
from typing import Literal

Rule = Literal["span", "prefix"]
Step = Literal["granule", "pow2"]
# What an engine's own step has left for the next prompt is taken from here on: left out, steps of 512 tokens over prompts of
# 1500 would go with 36 of 1536 rows empty. Less is not worth a prompt's start, and under 4 rows one engine's indexer crashes.
SLIVER_TOKENS = 16
RULES = ("span", "prefix")
STEPS = ("granule", "pow2")


def _require(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("%s=%r: must be a whole number" % (name, value))
    if value < least:
        raise ValueError("%s=%d: must be at least %d" % (name, value, least))


def _check(budget: int, prefix: int, minimum: int, maximum: int, granule: int, rule: str, step: str) -> None:
    _require("budget", budget, 0)
    _require("prefix", prefix, 0)
    _require("minimum", minimum, 1)
    _require("granule", granule, 1)
    _require("maximum", maximum, max(minimum, granule))
    if rule not in RULES:
        raise ValueError("rule=%r: must be one of %s" % (rule, ", ".join(RULES)))
    if step not in STEPS:
        raise ValueError("step=%r: must be one of %s" % (step, ", ".join(STEPS)))


def _largest(budget: int, prefix: int, rows: int, width: int, rule: str) -> int:
    """Largest T >= 0 that keeps the batch under the budget; negative when even its present rows are over it.

    span: (R+T)·(L+T) <= B and (R+T)·W <= B. With s = T + (R+L)/2 the first is s² <= B + ((L-R)/2)², so
    T = (isqrt((L-R)² + 4B) - (L+R)) // 2. prefix: (R+T)·max(L, W) <= B.
    """
    if rule == "span":
        alone = (isqrt((prefix - rows) ** 2 + 4 * budget) - (prefix + rows)) // 2
    else:
        alone = budget // max(prefix, 1) - rows
    return min(alone, budget // width - rows) if width else alone


def _round(tokens: int, granule: int, step: str) -> int:
    granules = tokens // granule
    if step == "pow2" and granules > 0:
        granules = 1 << (granules.bit_length() - 1)
    return granules * granule


def chunk_tokens(budget: int, prefix: int, *, minimum: int, maximum: int, granule: int,
                 rule: Rule = "span", step: Step = "granule") -> int:
    """New tokens that one request alone may take when `prefix` of its tokens are already in the KV cache.

    Returns a multiple of `granule` in [minimum, maximum], or 0 when less than `minimum` fits (an answer for admission;
    a request that an engine has accepted gets `minimum`, see `accepted_chunk_tokens`).
    Raises TypeError or ValueError, naming the argument, for values outside their range.

    >>> [chunk_tokens(200_000_000, L, minimum=256, maximum=2048, granule=256, rule="prefix", step="pow2")
    ...  for L in (0, 97_000, 100_000, 200_000, 400_000)]
    [2048, 2048, 1024, 512, 256]
    """
    return batch_chunk_tokens(budget, prefix, 0, 0, minimum=minimum, maximum=maximum, granule=granule,
                              rule=rule, step=step)


def batch_chunk_tokens(budget: int, prefix: int, rows: int, width: int, *, minimum: int, maximum: int, granule: int,
                       rule: Rule = "span", step: Step = "granule") -> int:
    """As `chunk_tokens`, for a batch that already holds `rows` new tokens and keys up to `width` long.

    `maximum` bounds this request's share, not the batch: the engine's own token budget does that.
    """
    _check(budget, prefix, minimum, maximum, granule, rule, step)
    _require("rows", rows, 0)
    _require("width", width, 0)
    return _fitting(budget, prefix, rows, width, minimum, maximum, granule, rule, step)


def _fitting(budget: int, prefix: int, rows: int, width: int, minimum: int, maximum: int, granule: int, rule: str,
             step: str) -> int:
    tokens = _round(min(_largest(budget, prefix, rows, width, rule), maximum), granule, step)
    return tokens if tokens >= minimum else 0


def fits(budget: int, prefix: int, tokens: int, rows: int = 0, width: int = 0, *, rule: Rule = "span") -> bool:
    """Whether exactly `tokens` more rows keep the batch under the line: the end of a prompt is what it is."""
    longest = max(prefix + tokens, width) if rule == "span" else max(prefix, width, 1)
    return (rows + tokens) * longest <= budget


def accepted_chunk_tokens(budget: int, prefix: int, remaining: int, rows: int, width: int, *, alone: bool, limit: int,
                          minimum: int, maximum: int, granule: int, rule: Rule = "span", step: Step = "granule") -> int:
    """New tokens, in [0, remaining], of a request that an engine has accepted, in a batch as for `batch_chunk_tokens`.

    `remaining` tokens of its prompt are still to be done and the engine itself allows `limit` of them in this step.
    0 leaves it out of the step, where others are; `alone` (no other prompt in the batch) gets at least `minimum`, over
    the line or not, or it would wait for ever. The end of a prompt is what it is, and so is a chunk of the engine's own that
    keeps under the line and is no sliver; no other chunk is under `minimum`.
    Checks nothing: it runs in every step of an engine, with settings that `chunk_tokens` has accepted at the start.
    """
    sliver = min(SLIVER_TOKENS, max(minimum, granule))
    if step == "granule" and sliver <= limit <= min(maximum, remaining) and fits(budget, prefix, limit, rows, width, rule=rule):
        return limit                         # nearly always, so it is asked first
    fitting = _fitting(budget, prefix, rows, width, minimum, maximum, granule, rule, step)
    if remaining <= min(fitting, limit):
        return remaining
    tokens = min(fitting, limit // granule * granule)
    if tokens >= minimum:
        return tokens
    if remaining <= min(limit, minimum) and fits(budget, prefix, remaining, rows, width, rule=rule):
        return remaining
    if not alone:
        return 0
    least = min(-(-minimum // granule) * granule, limit, remaining)
    return least if least == remaining else least // granule * granule or least


def longest_prefix(budget: int, *, minimum: int, granule: int, rule: Rule = "span") -> int:
    """The largest prefix at which `minimum` new tokens still fit, or -1 when they do not even at prefix 0.

    `chunk_tokens` answers at least `minimum` up to here (for any maximum that holds it) and 0 beyond. The chunk that
    counts is `minimum` rounded up to the granule.
    """
    _check(budget, 0, minimum, max(minimum, granule), granule, rule, "granule")
    least = -(-minimum // granule) * granule
    if rule == "prefix":
        return budget // least if budget >= least else -1
    return max(budget // least - least, -1)


def longest_prompt(budget: int, *, minimum: int, granule: int, rule: Rule = "span") -> int:
    """The longest prompt (tokens) whose every chunk can keep under the line; 0 when none can."""
    prefix = longest_prefix(budget, minimum=minimum, granule=granule, rule=rule)
    return prefix + -(-minimum // granule) * granule if prefix >= 0 else 0
