"""How long an engine should be silent before an answer, from what it took before. Pure bookkeeping, one for each peer.

The worst recent time per token counts and fades: a prediction says when to doubt a silence, so it has to be an upper one.
"""
from __future__ import annotations

from dataclasses import dataclass

FADE = 0.98                # of the worst, with each answer
FEWEST_TOKENS = 256        # a shorter prompt costs about what this many do: the fixed part of a request
FEWEST_NEW_TOKENS = 16
UNMEASURED_TOKENS_PER_SECOND = 100.0   # slower than any engine that people wait for; only for one step's prediction


@dataclass(slots=True)
class Pace:
    """Seconds per prompt token and per new token; None until an answer was measured."""
    prompt_seconds: float | None = None
    new_seconds: float | None = None

    def first_byte(self, seconds: float, prompt_tokens: int) -> None:
        """An answer began `seconds` after it was asked for, with `prompt_tokens` waiting or computed before it."""
        self.prompt_seconds = _worst(self.prompt_seconds, seconds / max(prompt_tokens, FEWEST_TOKENS))

    def whole(self, seconds: float, prompt_tokens: int, new_tokens: int) -> None:
        """An answer that is not streamed took `seconds`."""
        if new_tokens <= FEWEST_NEW_TOKENS and self.prompt_seconds is None:
            self.first_byte(seconds, prompt_tokens)        # nothing was streamed yet: better too much than nothing
        rest = max(seconds - (self.prefill_seconds(prompt_tokens) or 0.0), 0.0)
        self.new_seconds = _worst(self.new_seconds, rest / max(new_tokens, FEWEST_NEW_TOKENS))

    def prefill_seconds(self, prompt_tokens: int) -> float | None:
        if self.prompt_seconds is None:
            return None
        return self.prompt_seconds * max(prompt_tokens, FEWEST_TOKENS)

    def answer_seconds(self, prompt_tokens: int, new_tokens: int | None) -> float | None:
        """Until the first byte: of a stream (`new_tokens` 0), or of a whole answer; None: nothing tells."""
        prefill = self.prefill_seconds(prompt_tokens)
        if prefill is None or new_tokens == 0:
            return prefill
        if new_tokens is None or self.new_seconds is None:
            return None
        return prefill + self.new_seconds * max(new_tokens, FEWEST_NEW_TOKENS)

    def step_seconds(self, tokens: int, longest_step: float | None) -> float:
        """What one prefill step of at most `tokens` may take, as far as can be told."""
        per_token = self.prompt_seconds or 1 / UNMEASURED_TOKENS_PER_SECOND
        return max(longest_step or 0.0, per_token * tokens)


def _worst(before: float | None, now: float) -> float:
    return max(now, (before or 0.0) * FADE)


def joined(paces: list[Pace]) -> Pace:
    """What is known of like engines, for one that nothing is known of: the worst of each."""
    prompt = [pace.prompt_seconds for pace in paces if pace.prompt_seconds is not None]
    new = [pace.new_seconds for pace in paces if pace.new_seconds is not None]
    return Pace(max(prompt, default=None), max(new, default=None))
