"""Stand-in for triton (1 GB installed): without a GPU no kernel of it can run."""
import sys

from _absent import take_over

__version__ = "3.5.0"


def next_power_of_2(n):
    return 1 << (int(n) - 1).bit_length() if n > 0 else 0


def cdiv(x, y):
    return -(-x // y)


class _NoDriver:
    @property
    def active(self):  # triton's own answer where there is no GPU
        raise RuntimeError("0 active drivers ([]). There should only be one.")


take_over(__name__, {"triton.runtime": {"driver": _NoDriver()}})
from . import language, runtime  # noqa: E402,F401

# torch must find no triton: it looks once and remembers, so it looks now, while the stand-in is hidden.
_me, sys.modules[__name__] = sys.modules[__name__], None
try:
    import torch.utils._triton as _torch_triton

    for _name in ("has_triton_package", "has_triton"):
        getattr(_torch_triton, _name, bool)()
    import torch._inductor.runtime.triton_compat  # noqa: F401
finally:
    sys.modules[__name__] = _me
