"""How many new tokens one prefill row of a vLLM step gets. Pure; tokens and token² throughout."""
from typing import Any, NamedTuple, Tuple

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


Batch = Tuple[int, int, int]  # budget (token²), and the prefill rows and the longest key length that the step holds so far


def grant(rules: Rules, batch: Batch, prefix: int, offered: int, remaining: int) -> int:
    """New tokens for a request at `prefix` that the engine would give `offered` of its `remaining` tokens.

    Never more than offered. 0 leaves the request out of this step, which happens only to a step that has rows: the
    first one always gets something, or it would wait for ever.
    """
    budget, rows, width = batch
    if rules.block and prefix % rules.block:  # on its way to the next boundary: as it is or not at all
        fits = line.fits(budget, prefix, offered, rows, width, rule=rules.rule)
        return offered if fits or not rows else 0
    if rules.block and offered < remaining:  # and what is not the end of a prompt ends on a boundary, whatever was offered
        offered = offered // rules.block * rules.block or offered
    return line.accepted_chunk_tokens(
        budget, prefix, remaining, rows, width, alone=not rows, limit=offered,
        minimum=rules.minimum, maximum=rules.maximum, granule=rules.granule, rule=rules.rule, step=rules.step)
