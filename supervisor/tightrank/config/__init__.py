"""Configuration: one tightrank.yaml, TIGHTRANK_* variables and `--set` -> one frozen `Config`."""
from tightrank.config.load import Loaded, Resolved, load, load_gateway
from tightrank.config.secrets import read_secret
from tightrank.config.shape import AUTO, Config, Gateway, GatewayWorker, Guard, Http, Limits, Line, Nodes, Pd, Worker

__all__ = ["AUTO", "Config", "Gateway", "GatewayWorker", "Guard", "Http", "Limits", "Line", "Loaded", "Nodes", "Pd",
           "Resolved", "Worker", "load", "load_gateway", "read_secret"]
