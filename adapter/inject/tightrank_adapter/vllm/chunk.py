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
    if offered >= remaining and offered <= rules.maximum and _fits(rules, batch, prefix, offered):
        return offered
    if rules.block and prefix % rules.block:  # on its way to the next boundary: as it is or not at all
        return offered if not batch.rows or _fits(rules, batch, prefix, offered) else 0
    most = min(rules.maximum, offered)
    fitting = line.batch_chunk_tokens(
        batch.budget, prefix, batch.rows, batch.width, minimum=rules.minimum, maximum=most, granule=rules.granule,
        rule=rules.rule, step=rules.step) if most >= max(rules.minimum, rules.granule) else 0
    if fitting or batch.rows:
        return fitting
    return _forced(rules, offered, remaining)


def _fits(rules: Rules, batch: Batch, prefix: int, tokens: int) -> bool:
    return line.fits(batch.budget, prefix, tokens, batch.rows, batch.width, rule=rules.rule)


def _forced(rules: Rules, offered: int, remaining: int) -> int:
    """The first row of a step: the line, or the engine's own limit, leaves less than `minimum`."""
    tokens = min(offered, rules.least)
    if tokens == remaining:
        return tokens
    return tokens // rules.granule * rules.granule or tokens
