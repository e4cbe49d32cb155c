"""Whether two runs answer alike, token by token. Pure: answers with logprobs in, a verdict for each prompt out.

Greedy answers of one model may part where two tokens are nearly as likely: chunks of another size add up in another order
(seen in bf16 with a top-2 gap under 0.1). After that the texts are different prompts, so only the first difference counts.
"""
from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

NEAR_TIE = 0.1                 # of the logprobs of the two likeliest tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    """Random token IDs in [first, end), the same ones each time."""
    number: int
    tokens: int
    first: int
    end: int

    def ids(self) -> list[int]:
        source = random.Random(f"parity {self.number} {self.tokens}")  # noqa: S311
        return source.choices(range(self.first, self.end), k=self.tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer. `gaps`: by how much the likeliest token was ahead of the next; None: only one was told."""
    prompt: Prompt
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one prompt. `result`: equal, near-tie or different; `at`: the first token that differs; `gap`: the larger there."""
    prompt: Prompt
    result: str
    at: int | None
    gap: float | None
    largest_logprob_difference: float      # of the tokens before


def judge(a: Answer, b: Answer) -> Verdict:
    """A difference is a near tie only where neither side was sure: what was sure once was moved by more than noise."""
    at = next((index for index, pair in enumerate(zip(a.tokens, b.tokens, strict=False)) if pair[0] != pair[1]), None)
    if at is None and len(a.tokens) != len(b.tokens):
        at = min(len(a.tokens), len(b.tokens))
    known = [gap for side in (a, b) for gap in side.gaps[at:at + 1] if gap is not None] if at is not None else []
    gap = max(known, default=None)
    same = zip(a.logprobs[:at], b.logprobs[:at], strict=False)
    result = "equal" if at is None else "near-tie" if gap is not None and gap < NEAR_TIE else "different"
    return Verdict(a.prompt, result, at, gap, max((abs(x - y) for x, y in same), default=0.0))


def alike(verdicts: Sequence[Verdict]) -> bool:
    return all(verdict.result != "different" for verdict in verdicts)


def sentence(verdicts: Sequence[Verdict]) -> str:
    counts = {name: sum(verdict.result == name for verdict in verdicts) for name in ("equal", "near-tie", "different")}
    return (f"{counts['equal']} of {len(verdicts)} answers are equal, {counts['near-tie']} part at a near tie, "
            f"{counts['different']} differ")


# --- on disk ----------------------------------------------------------------------------------------------------------

def to_json(url: str, engine: str, model: str, answers: Sequence[Answer]) -> dict[str, Any]:
    return {"url": url, "engine": engine, "model": model, "answers": [asdict(answer) for answer in answers]}


def from_json(body: Mapping[str, Any]) -> tuple[Answer, ...]:
    """Raises KeyError, TypeError or ValueError for another form."""
    return tuple(_answer(entry) for entry in body["answers"])


def _answer(entry: Mapping[str, Any]) -> Answer:
    prompt = Prompt(**{name: int(entry["prompt"][name]) for name in ("number", "tokens", "first", "end")})
    return Answer(prompt, tuple(map(int, entry["tokens"])), tuple(map(float, entry["logprobs"])),
                  tuple(None if gap is None else float(gap) for gap in entry["gaps"]))


# --- what the engines say ---------------------------------------------------------------------------------------------

def request(engine: str, model: str, prompt: Prompt, answer_tokens: int) -> tuple[str, dict[str, Any]]:
    """Path and body: a greedy answer with the two likeliest tokens at each place, by their IDs (texts need not be unique)."""
    if engine == "sglang":
        return "/generate", {"input_ids": prompt.ids(), "return_logprob": True, "top_logprobs_num": 2,
                             "sampling_params": {"max_new_tokens": answer_tokens, "temperature": 0.0, "ignore_eos": True}}
    return "/v1/completions", {"model": model, "prompt": prompt.ids(), "max_tokens": answer_tokens, "temperature": 0,
                               "ignore_eos": True, "logprobs": 2, "return_tokens_as_token_ids": True}


def read(engine: str, prompt: Prompt, body: Any) -> Answer:
    """The answer to `request`. Raises KeyError, TypeError, ValueError, IndexError or AttributeError for another form."""
    if engine == "sglang":
        told = body["meta_info"]
        chosen = [(int(token), float(logprob)) for logprob, token, *_ in told["output_token_logprobs"]]
        tops = [[float(logprob) for logprob, *_ in place] for place in told["output_top_logprobs"]]
    else:
        told = body["choices"][0]["logprobs"]
        chosen = list(zip(map(_token_id, told["tokens"]), map(float, told["token_logprobs"]), strict=True))
        tops = [list(map(float, place.values())) for place in told["top_logprobs"]]
    if not chosen or len(tops) != len(chosen):
        raise ValueError(f"{len(chosen)} tokens with {len(tops)} places of logprobs")
    return Answer(prompt, tuple(token for token, _ in chosen), tuple(logprob for _, logprob in chosen), tuple(map(_gap, tops)))


def _token_id(text: str) -> int:
    """vLLM's "token_id:17"."""
    name, _, number = text.partition(":")
    if name != "token_id":
        raise ValueError(f"{text[:20]!r} is no token ID")
    return int(number)


def _gap(logprobs: Sequence[float]) -> float | None:
    first, *rest = sorted(logprobs, reverse=True)
    return first - rest[0] if rest else None
