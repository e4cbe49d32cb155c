"""How many new tokens one prefill row of a vLLM step gets. Pure; tokens and token² throughout."""
from typing import Any, NamedTuple

from .. import line


class Rules(NamedTuple):
    """What does not change while the engine runs. `block` > 0: chunks must end on a multiple of it (mamba "align")."""
    minimum: int
    maximum: int
    granule: int
    rule: Any
    step: Any
    block: int = 0

    @property
    def least(self) -> int:
        """What an accepted request gets where less than `minimum` fits."""
        return -(-self.minimum // self.granule) * self.granule


class Batch(NamedTuple):
    """The prefill rows that the step holds so far."""
    budget: int
    rows: int
    width: int


def grant(rules: Rules, batch: Batch, prefix: int, offered: int, remaining: int) -> int:
    """New tokens for a request at `prefix` that the engine would give `offered` of its `remaining` tokens.

    Never more than offered. 0 leaves the request out of this step, which happens only to a step that has rows: the
    first one always gets something, or it would wait for ever.
    """
    if rules.block and prefix % rules.block:  # on its way to the next boundary: as it is or not at all
        fits = line.fits(batch.budget, prefix, offered, batch.rows, batch.width, rule=rules.rule)
        return offered if fits or not batch.rows else 0
    return line.accepted_chunk_tokens(
        batch.budget, prefix, remaining, batch.rows, batch.width, alone=not batch.rows, limit=offered,
        minimum=rules.minimum, maximum=rules.maximum, granule=rules.granule, rule=rules.rule, step=rules.step)
