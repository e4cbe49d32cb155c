"""The group of a pipeline stage's ranks."""
from types import SimpleNamespace

_tensor_parallel = SimpleNamespace(cpu_group=None)


def get_tp_group():
    return _tensor_parallel
