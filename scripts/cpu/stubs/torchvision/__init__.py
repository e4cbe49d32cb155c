"""Stand-in for torchvision: its wheels link CUDA, and a CPU torch cannot load their operators."""
from _absent import take_over

__version__ = "0.28.0"
take_over(__name__)
from . import io, ops, transforms  # noqa: E402,F401
