"""Configuration: one tightrank.yaml, TIGHTRANK_* variables and `--set` -> one frozen `Config`."""
from tightrank.config.load import Loaded, Resolved, load
from tightrank.config.shape import Config, Guard, Http, Limits, Line, Worker

__all__ = ["Config", "Guard", "Http", "Limits", "Line", "Loaded", "Resolved", "Worker", "load"]
