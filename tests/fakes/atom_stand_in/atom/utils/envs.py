"""As ATOM's: asked for by attribute, read from the environment each time."""
import os

environment_variables = {}
if os.environ.get("STAND_IN_ATOM", "head") == "head":
    environment_variables["ATOM_SPARSE_INDEXER_LOGITS_BUDGET_MB"] = lambda: int(
        os.environ.get("ATOM_SPARSE_INDEXER_LOGITS_BUDGET_MB", 2048))


def __getattr__(name):
    try:
        return environment_variables[name]()
    except KeyError:
        raise AttributeError(name) from None
