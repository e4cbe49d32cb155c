"""Hook `line` on vLLM >= 0.28: keeps the prefill rows of every scheduler step under the budget.

`Scheduler._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)` has the last word on the chunk of
every running and waiting request, and its num_computed_tokens includes the cached prefix, local and external. So the
scheduler class that the engine chose is subclassed and that one method lowered; the engine's own comes after ours.
An answer of 0 means what it means to vLLM: a running request is skipped in this step, a waiting one not yet admitted.
"""
from math import lcm
from typing import Any, Callable, Dict

from .. import fault, line, pages, rank, wire
from . import chunk, ranks, steps

HOOK = "line"
TARGET = "_reserve_prefill_lookahead"
_ARGUMENTS = ("self", "request", "num_computed_tokens", "num_new_tokens")
_steered: Dict[Any, Any] = {}


class Steering:
    """The line of one scheduler: its rules, the budget now, and the prefill rows of the step being made."""

    def __init__(self, scheduler: Any) -> None:
        """Raises fault.Missing when this engine, configured as it is, cannot keep the line."""
        self._line = rank.settings().line
        self._page = _control_page()
        self._unreadable = False
        self.rules = _rules(scheduler, self._line)
        self.observed = rank.settings().observes(HOOK)  # nothing is lowered; each step's record says whether it was over
        self.decode_rows = 1 + scheduler.num_spec_tokens
        self.budget: int = self._line["budget"]
        self.rows = self.width = 0

    def begin(self) -> None:
        """A new step: no rows yet, and the budget as it is published now."""
        self.rows = self.width = 0
        if self._page is None:
            return
        try:
            budget = self._page.budget()
            self._unreadable = False
        except wire.WireError as error:  # the last good value stays; told once, not in every step
            if not self._unreadable:
                self._unreadable = True
                fault.report(HOOK, wire.CONTROL, error)
            return
        if budget != self.budget:
            self.budget = budget
            rank.fact("line_budget", budget)

    def grant(self, request: Any, prefix: int, offered: int) -> int:
        """New tokens for `request`: what `decide` answers, or `least` where that fails. The body is for where both do."""
        return offered

    def least(self, request: Any, prefix: int, offered: int) -> int:
        """The minimum to the first prompt of a step and nothing to the others, never what the engine offers."""
        if self.rows and offered > self.decode_rows:
            return 0
        tokens = min(offered, self.rules.least)
        self.rows += tokens
        return tokens

    def decide(self, request: Any, prefix: int, offered: int) -> int:
        """New tokens for `request`. Rows past the prompt are decode rows and stay as they are."""
        if offered <= 0 or prefix >= max(request.num_prompt_tokens, request.num_tokens - 1):
            return offered
        remaining = request.num_tokens - prefix
        # A last token padded to a full row of drafts (offered > remaining) must stay whole.
        tokens = offered if offered > remaining else chunk.grant(
            self.rules, (self.budget, self.rows, self.width), prefix, offered, remaining)
        if tokens:
            self.rows += tokens
            self.width = max(self.width, prefix + tokens if self.rules.rule == "span" else prefix)
        return tokens


def install(module: Any) -> None:
    """Gets vllm.config.scheduler."""
    fault.wrap(Steering, "grant", HOOK, before=lambda self, *args: fault.Answer(self.decide(*args)),
               fallback=lambda self, *args: fault.Answer(self.least(*args)))
    fault.wrap(fault.require(module, "SchedulerConfig", ranks.release()), "get_scheduler_cls", HOOK, after=_steer_class)


def _steer_class(token: None, base: Any, *args: Any) -> fault.Answer:
    if base not in _steered:
        fault.contained(HOOK, "SchedulerConfig.get_scheduler_cls", _make_class)(base)
    return fault.Answer(_steered.get(base, base))


def _make_class(base: Any) -> None:
    target = fault.require(base, TARGET, ranks.release())
    names = target.__code__.co_varnames[:target.__code__.co_argcount]
    if names != _ARGUMENTS:
        raise fault.Missing("%s%r" % (TARGET, _ARGUMENTS), "%r in %s" % (names, ranks.release()))
    steered = type(base.__name__, (base,), {"__module__": base.__module__, "__qualname__": base.__qualname__,
                                            "_tightrank": None, TARGET: _lowered(target)})
    fault.wrap(steered, "__init__", HOOK, after=_scheduler_made)
    fault.wrap(steered, "schedule", HOOK, before=_step_begins, after=_step_made, fallback=_step_is_bare)
    _steered[base] = steered


def _lowered(target: Callable[..., int]) -> Callable[..., int]:
    def _reserve_prefill_lookahead(self: Any, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        steering = self._tightrank
        # Decode rows pass at once, since every running request comes through here in every step. `getattr` because
        # this line is outside the fault wrapper.
        if steering is not None and not steering.observed and (
                num_new_tokens > steering.decode_rows or num_computed_tokens < getattr(request, "num_prompt_tokens", 0)):
            num_new_tokens = steering.grant(request, num_computed_tokens, num_new_tokens)
        return target(self, request, num_computed_tokens, num_new_tokens)

    return _reserve_prefill_lookahead


def _scheduler_made(token: None, result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    fault.contained(HOOK, "Scheduler.__init__", _steer)(scheduler)


def _steer(scheduler: Any) -> None:
    scheduler._tightrank = steering = Steering(scheduler)
    rank.fact("granule_tokens", steering.rules.granule)
    rank.fact("maximum_tokens", steering.rules.maximum)
    rank.fact("line_budget", steering.budget)
    rank.hook(HOOK, wire.IN_FORCE)


def _step_begins(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    steering = scheduler._tightrank
    if steering is None:
        return None
    steering.begin()
    return steering.budget


def _step_is_bare(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `_step_begins`: no rows yet, the budget as it was."""
    steering = scheduler._tightrank
    if steering is None:
        return None
    steering.rows = steering.width = 0
    return steering.budget


def _step_made(budget: Any, output: Any, *args: Any, **kwargs: Any) -> None:
    setattr(output, steps.BUDGET, budget)


def _rules(scheduler: Any, settings: Dict[str, Any]) -> chunk.Rules:
    observed = rank.settings().observes(HOOK)
    if not scheduler.scheduler_config.enable_chunked_prefill and not observed:
        raise fault.Missing("enable_chunked_prefill=True", "enable_chunked_prefill=False in %s" % ranks.release())
    most = scheduler.max_num_scheduled_tokens
    granule, block = lcm(settings["granule"], scheduler.block_size), 0
    if scheduler.need_mamba_block_aligned_split:
        block = scheduler.cache_config.block_size
        granule = lcm(granule, block)
    maximum = settings["maximum"] if observed else min(settings["maximum"], most)
    rules = chunk.Rules(settings["minimum"], maximum, granule, settings.get("rule", "span"),
                        settings.get("step", "granule"), block)
    if rules.maximum < rules.least:
        raise fault.Missing(
            "a step of at least %d tokens (line.minimum %d in granules of %d)" % (rules.least, rules.minimum, granule),
            "%d (line.maximum %d, --max-num-batched-tokens %d)" % (rules.maximum, settings["maximum"], most))
    line.chunk_tokens(settings["budget"], 0, minimum=rules.minimum, maximum=rules.maximum, granule=granule, rule=rules.rule,
                      step=rules.step)  # checks them once and for all
    return rules


def _control_page() -> Any:
    try:
        return pages.ControlReader(rank.directory())
    except OSError:  # none was made for this generation: the settings' budget stands
        return None
