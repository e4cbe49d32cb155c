"""Pure: one snapshot and the workers' views -> decisions, each with its sentence. It neither logs nor acts.

For each worker the first rule that speaks decides. The rules stand in the order in which they may overrule each other:
what a person asked for, then what proves a failure, then what is waited for.
"""
from tightrank.decide.case import Policy
from tightrank.decide.proofs import missing_hooks
from tightrank.decide.rules import RESTARTS, STEADY_SECONDS, decide

__all__ = ["RESTARTS", "STEADY_SECONDS", "Policy", "decide", "missing_hooks"]
