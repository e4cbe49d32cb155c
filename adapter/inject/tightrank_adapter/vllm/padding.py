"""What the hook `heads` does with tensors: padded prefill attention, and the question of what a release does by itself.

AITER's kernels attend each head by itself (after kv_b_proj every query head has its own keys and values), so copies of
heads beside the real ones change nothing in these. We always tile: head j of the padded tensors is real head j % heads,
and the real ones come back as the first. The release's own functions are run on a stand-in for its object (`As`), so
that its kernel calls, arguments and all, stay its own.
"""
import sys
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Callable, List, NamedTuple, Tuple

from .. import fault, heads

HOOK = "heads"
_IDENTITY_BITS = 8  # a head's number in 0 and 1, which every FP8 form holds exactly
BACKEND = "vllm.v1.attention.backends.mla.rocm_aiter_mla"


class As:
    """An engine's object with some attributes of ours. All others are read from it and written to it."""

    def __init__(self, inner: Any, **ours: Any) -> None:
        self.__dict__.update(ours, _inner=inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self.__dict__["_inner"], name, value)


def scratch(wide: int, value_dim: int, tiles: int, tokens: int) -> List[Tuple[Tuple[int, ...], Any]]:
    """The workspace of one call as (shape, dtype): what the release asks for itself, then the padded output behind it.

    The manager lays out what is asked for together in that order from its start, so the release's own request, made
    while ours is in use, gets the same first three places.
    """
    torch = sys.modules["torch"]
    rows = tiles * heads.TILE_TOKENS
    return [((rows, wide, value_dim), torch.float32), ((rows, wide), torch.float32), ((tokens, wide), torch.float32),
            ((tokens, wide, value_dim), torch.bfloat16)]


def reserve(shapes: List[Tuple[Tuple[int, ...], Any]]) -> Any:
    """The last of `shapes` from vLLM's workspace. Raises AssertionError when it is locked and too small."""
    manager = import_module("vllm.v1.worker.workspace").current_workspace_manager()
    return manager.get_simultaneous(*shapes)[-1]


class Padded:
    """The FP8 prefill of one attention object at the kernels' width; `forward` has the engine's own arguments."""

    def __init__(self, module: Any, impl: Any, kernels: Any) -> None:
        """`kernels`: AITER's module, or what stands in for it."""
        self.heads, self.wide = impl.num_heads, heads.width(impl.num_heads)
        self._value_dim = impl.v_head_dim
        self._attend = partial(own(module.AiterMLAImpl, "_mla_fp8_prefill_attn"), As(
            impl, num_heads=self.wide, _mla_prefill_ps_asm_fwd=kernels.mla_prefill_ps_asm_fwd,
            _mla_reduce_v1=kernels.mla_reduce_v1))
        # Without the fused form of 0.33: it pads by a rule of AITER's own.
        self.forward = partial(own(module.AiterMLAImpl, "forward_mha"),
                               As(impl, _fp8_prefill_enabled=True, _fused_prefill_qkv=False,
                                  _mla_fp8_prefill_attn=self.attend))
        self._index: Any = None

    def attend(self, q: Any, k: Any, v: Any, metadata: Any, out: Any) -> None:
        """q, k [tokens, heads, nope + rope], v [tokens, heads, value] bf16 -> out [tokens, heads · value] bf16."""
        tokens = q.shape[0]
        shapes = scratch(self.wide, self._value_dim, metadata.fp8_prefill_num_partial_tiles, tokens)
        wide_out = reserve(shapes)
        self._attend(self.tile(q), self.tile(k), self.tile(v), metadata, wide_out.view(tokens, -1))
        out.view(tokens, self.heads, self._value_dim).copy_(wide_out[:, :self.heads])

    def tile(self, tensor: Any) -> Any:
        """[tokens, heads, dim] -> FP8 [tokens, wide, dim]. FP8 first, as bytes: half the copy, and the same bits."""
        torch, form = sys.modules["torch"], _platform().fp8_dtype()
        if self._index is None:
            self._index = torch.arange(self.wide, device=tensor.device) % self.heads
        return tensor.to(form).view(torch.uint8).index_select(1, self._index).view(form)


def _platform() -> Any:
    return import_module("vllm.platforms").current_platform


def own(owner: Any, name: str) -> Callable[..., Any]:
    """The release's own function under our wrapper. Raises fault.Missing."""
    function = fault.require(owner, name)
    while fault.is_wrapped(function, HOOK):
        function = function.__wrapped__
    return function  # type: ignore[no-any-return]


class Seen(NamedTuple):
    """`wide`: heads that the kernel was handed. `exact`: each real head came back in its own place."""
    wide: int
    exact: bool


def seen(module: Any, impl: Any) -> Seen:
    """What the release's own forward_mha does with numbered heads, over kernels that copy values to outputs."""
    kernels, (values, arguments) = _Copies(), _numbered_call(module, impl, 0)
    asked = As(impl, _mla_prefill_ps_asm_fwd=kernels.mla_prefill_ps_asm_fwd, _mla_reduce_v1=kernels.mla_reduce_v1,
               _fp8_prefill_enabled=True, _fp8_prefill_one_scale=None, kv_b_proj=lambda rows: rows)
    asked.__dict__["_mla_fp8_prefill_attn"] = partial(own(module.AiterMLAImpl, "_mla_fp8_prefill_attn"), asked)
    own(module.AiterMLAImpl, "forward_mha")(asked, *arguments)
    return kernels.seen(values, arguments[-1])


def ours(module: Any, impl: Any) -> Seen:
    """The same of `Padded`, with a partial tile: its output must lie beside the release's scratch, not on it."""
    kernels, (values, arguments) = _Copies(), _numbered_call(module, impl, 1)
    Padded(module, As(impl, kv_b_proj=lambda rows: rows, _fp8_prefill_one_scale=None), kernels).forward(*arguments)
    return kernels.seen(values, arguments[-1])


def _numbered_call(module: Any, impl: Any, tiles: int) -> Tuple[Any, Tuple[Any, ...]]:
    """The values, and arguments of forward_mha whose last is the output; for a kv_b_proj that answers what it gets."""
    torch: Any = sys.modules["torch"]
    tokens, count = 2, impl.num_heads
    device = reserve(scratch(heads.width(count), impl.v_head_dim, tiles, tokens)).device
    nope, rope, values = (_numbered(tokens, count, dim, device)
                          for dim in (impl.qk_nope_head_dim, impl.qk_rope_head_dim, impl.v_head_dim))
    latent = torch.cat([nope, values], dim=-1).view(tokens, -1)
    metadata = object.__new__(module.AiterMLAMetadata)
    metadata.prefill = SimpleNamespace(chunked_context=None)
    metadata.fp8_prefill_qo_indptr, metadata.fp8_prefill_num_partial_tiles = metadata, tiles
    return values, (torch.cat([nope, rope], dim=-1), [latent], torch.zeros_like(rope[:, :1]), None, metadata, None,
                    torch.zeros_like(values).view(tokens, -1))


def _numbered(tokens: int, count: int, dim: int, device: Any) -> Any:
    """bf16 [tokens, count, dim]: each head's number in the first bits, zeros behind."""
    torch: Any = sys.modules["torch"]
    numbers = torch.arange(count, device=device)
    tensor = torch.zeros(tokens, count, dim, dtype=torch.bfloat16, device=device)
    for bit in range(min(_IDENTITY_BITS, dim)):
        tensor[:, :, bit] = (numbers >> bit & 1).to(torch.bfloat16)
    return tensor


class _Copies:
    """Stands in for AITER: each output head is the value head of the same place, and the scratch is spoilt."""
    wide = 0

    def mla_prefill_ps_asm_fwd(self, q: Any, k: Any, v: Any, *rest: Any) -> None:
        torch: Any = sys.modules["torch"]
        numbers = [each[:, :, :_IDENTITY_BITS].float() for each in (q, k, v)]
        if not torch.equal(numbers[0], numbers[1]) or not torch.equal(numbers[1], numbers[2]):
            raise ValueError("queries, keys and values are padded in different ways")
        [out] = [each for each in rest if isinstance(each, torch.Tensor) and each.dtype == torch.bfloat16]
        self.wide = out.shape[1]
        out.copy_(v.to(out.dtype))

    def mla_reduce_v1(self, *args: Any) -> None:
        torch: Any = sys.modules["torch"]
        for each in args:
            if isinstance(each, torch.Tensor) and each.dtype == torch.float32:
                each.fill_(torch.nan)

    def seen(self, values: Any, out: Any) -> Seen:
        return Seen(self.wide, bool(sys.modules["torch"].equal(out.view_as(values), values)))
