"""Hook `heads` on vLLM: the FP8 MLA prefill of ROCm's AITER backend at every head count its kernels can be padded to.

Which of three things a release needs is asked of its own functions, once for each head count (`padding.seen`):
  backport     it does not pad, so its gate leaves the path off: the path as it is at the kernels' width, and its metadata
  repair       its path gives heads back in wrong places: ours in its place, its metadata is right
  not needed   every head comes back in its own place
Its own path is off for the counts that are repaired, so wherever ours does not answer (a fault, a context, another
dtype) the engine's bf16 path does, as for the counts of a backport.
"""
import inspect
import sys
from importlib import import_module
from typing import Any, Dict, List, Optional, Tuple

from .. import fault, heads, rank, wire
from . import padding, ranks

HOOK = padding.HOOK
MARK = "tightrank_heads"  # on an attention object: its Padded; on a metadata builder: its stand-in at the kernels' width
BACKPORT, REPAIR, NOT_NEEDED = "backport", "repair", "not needed"
_FP8_CACHES = ("fp8", "fp8_e4m3", "fp8_e5m2")
_WANTED = "vLLM's ROCm AITER MLA backend with FP8 prefill"
_modes: Dict[int, str] = {}     # heads of each attention object so far: what it needs
_widths: Dict[int, int] = {}    # heads of each metadata builder so far: the width its metadata is made for
_asked: List[int] = []          # widths asked of AITER while the builder of this moment is made


def install(module: Any) -> None:
    """Gets vllm.v1.attention.backends.mla.rocm_aiter_mla."""
    impl = fault.require(module, "AiterMLAImpl", ranks.release())
    builder = fault.require(module, "AiterMLAMetadataBuilder", ranks.release())
    for owner, name in ((impl, "forward_mha"), (impl, "_mla_fp8_prefill_attn"), (builder, "_build_fp8_prefill_ps_metadata"),
                        (builder, "_init_fp8_prefill_ps_buffers"), (builder, "build"), (module, "AiterMLAMetadata"),
                        (module, "_fp8_mla_prefill_supported")):
        fault.require(owner, name, ranks.release())
    if module._FP8_PREFILL_TILE_Q != heads.TILE_TOKENS:
        raise fault.Missing("tiles of %d queries" % heads.TILE_TOKENS, "%d" % module._FP8_PREFILL_TILE_Q)
    fault.wrap(impl, "__init__", HOOK, after=_impl_made)
    if not _observing():
        fault.wrap(impl, "forward_mha", HOOK, before=_forward)
        fault.wrap(builder, "_init_fp8_prefill_ps_buffers", HOOK, before=_gate)
        fault.wrap(builder, "__init__", HOOK, before=_builder_starts, after=_builder_made)
        fault.wrap(builder, "build", HOOK, after=_built)


def worker(module: Any) -> None:
    """Gets vllm.v1.worker.gpu_worker. After initialize_from_config all layers and metadata builders exist."""
    fault.wrap(fault.require(module, "Worker", ranks.release()), "initialize_from_config", HOOK, after=_settle,
               fallback=lambda *args, **kwargs: None)  # the state is told even when faults have turned the hook off


def _observing() -> bool:
    return bool(rank.settings().observes(HOOK))


def _module() -> Any:
    return sys.modules[padding.BACKEND]


def _impl_made(token: None, result: None, impl: Any, *args: Any, **kwargs: Any) -> None:
    """Decides what this head count needs, and puts ours in place of the release's own path when that is wrong."""
    module, count = _module(), impl.num_heads
    if not module._fp8_mla_prefill_supported() or impl.kv_cache_dtype not in _FP8_CACHES:
        return
    if count not in _modes:
        fault.contained(HOOK, "AiterMLAImpl.padding", _decide, module)(impl)
    if _modes.get(count, NOT_NEEDED) != NOT_NEEDED and not _observing():
        setattr(impl, MARK, padding.Padded(module, impl, import_module("aiter")))
        impl._fp8_prefill_enabled = False


def _decide(module: Any, impl: Any) -> None:
    """A release that pads by itself and still leaves its path off has a reason of its own, which we leave to it."""
    count, is_on = impl.num_heads, impl._fp8_prefill_enabled
    wide, seen = heads.width(count), fault.drilled("padding.seen", padding.seen)(module, impl)
    if is_on and seen.wide == wide:
        mode = NOT_NEEDED if seen.exact else REPAIR
    elif not is_on and seen.wide == count < wide:
        mode = BACKPORT
    else:
        raise fault.Missing("FP8 prefill of %d heads at %d" % (count, wide), "%s, at %d, in %s" % (
            "on" if is_on else "left off by the gate", seen.wide, ranks.release()))
    if mode != NOT_NEEDED and not _observing():
        ours = fault.drilled("padding.ours", padding.ours)(module, impl)
        if ours != (wide, True):
            raise fault.Missing("ours exact for %d heads at %d" % (count, wide), "%r in %s" % (ours, ranks.release()))
    _modes[count] = mode


def _forward(impl: Any, q: Any, kv_c_normed: Any, k_pe: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, k_scale: Any,
             output: Any, output_scale: Any = None) -> Optional[fault.Answer]:
    """Ours where the release's own FP8 path would be; None leaves the call to the engine."""
    padded = getattr(impl, MARK, None)
    if padded is None or output_scale is not None or not _takes_fp8(attn_metadata, output):
        return None
    padded.forward(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output)
    return fault.Answer(None)


def _takes_fp8(metadata: Any, output: Any) -> bool:
    """The builder made a plan (it sets the number of tiles last), no context, and an output that bf16 can be written to."""
    return (getattr(metadata, "fp8_prefill_num_partial_tiles", None) is not None and _is_bf16(output.dtype)
            and metadata.prefill is not None and metadata.prefill.chunked_context is None)


def _refused(vllm_config: Any) -> str:
    """Why the kernels may not run: they are for an FP8 KV cache, and write bf16 through a bare pointer."""
    cache, model = vllm_config.cache_config.cache_dtype, vllm_config.model_config.dtype
    if cache in _FP8_CACHES and _is_bf16(model):
        return ""
    return "KV cache %s, model %s" % (cache, str(model).replace("torch.", ""))


def _is_bf16(dtype: Any) -> bool:
    return dtype is sys.modules["torch"].bfloat16


def _gate(builder: Any, *args: Any, **kwargs: Any) -> Optional[fault.Answer]:
    """Releases whose own gate knows only the head count would reserve, and write bf16 into fp16 outputs."""
    if not _refused(builder.vllm_config):
        return None
    builder._fp8_prefill_enabled = False
    return fault.Answer(None)


def _builder_starts(*args: Any, **kwargs: Any) -> None:
    del _asked[:]
    if _module()._fp8_mla_prefill_supported():
        aiter = import_module("aiter")
        if not fault.is_wrapped(fault.require(aiter, "get_ps_metadata_info_v1"), HOOK):
            fault.wrap(aiter, "get_ps_metadata_info_v1", HOOK, before=_width_asked)


def _width_asked(batch_size: Any = None, num_head_k: Any = None, *args: Any, **kwargs: Any) -> None:
    _asked.append(num_head_k)


def _builder_made(token: None, result: None, builder: Any, kv_cache_spec: Any, layer_names: Any, vllm_config: Any,
                  device: Any) -> None:
    """Makes the metadata's buffers at the kernels' width where ours is a backport."""
    count = builder.num_heads
    if _modes.get(count) == BACKPORT and not builder._fp8_prefill_enabled and not _refused(vllm_config):
        wide = padding.As(builder, num_heads=heads.width(count))
        _init_buffers(_module(), wide, vllm_config, device)
        tiles, tokens = builder.fp8_ps_reduce_partial_map.numel(), vllm_config.scheduler_config.max_num_batched_tokens
        padding.reserve(padding.scratch(wide.num_heads, builder.mla_dims.v_head_dim, tiles, tokens))
        setattr(builder, MARK, wide)
    if _asked:
        _widths[count] = _asked[-1]


def _init_buffers(module: Any, wide: Any, vllm_config: Any, device: Any) -> None:
    limits, model = vllm_config.scheduler_config, vllm_config.model_config
    known = {"max_num_reqs": limits.max_num_seqs, "max_num_batched_tokens": limits.max_num_batched_tokens,
             "max_prefill_qlen": min(model.max_model_len, limits.max_num_batched_tokens), "attn_out_dtype": model.dtype,
             "device": device}
    function = padding.own(module.AiterMLAMetadataBuilder, "_init_fp8_prefill_ps_buffers")
    names = list(inspect.signature(function).parameters)[1:]
    if not set(names) <= set(known):
        raise fault.Missing("_init_fp8_prefill_ps_buffers(%s)" % ", ".join(known),
                            "(%s) in %s" % (", ".join(names), ranks.release()))
    function(wide, **{name: known[name] for name in names})


def _built(token: None, metadata: Any, builder: Any, common_prefix_len: Any, common_attn_metadata: Any, *args: Any,
           **kwargs: Any) -> None:
    """The plan of this batch, where the release left its own path off."""
    wide = getattr(builder, MARK, None)
    if wide is not None and metadata.prefill is not None and metadata.prefill.chunked_context is None:
        padding.own(_module().AiterMLAMetadataBuilder, "_build_fp8_prefill_ps_metadata")(wide, metadata, common_attn_metadata)


def _settle(token: None, result: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
    """The hook's state in this worker. A model or device that has no use for it is a failure: it was asked for."""
    module = sys.modules.get(padding.BACKEND)
    wanted, found = _unmet(module, worker)
    if not wanted:
        rank.fact(HOOK, {str(count): {"mode": mode, "width": heads.width(count), "metadata_width": _widths.get(count)}
                         for count, mode in _modes.items()})
        rank.hook(HOOK, wire.IN_FORCE)
        return
    rank.hook(HOOK, wire.FAILED, wanted, found)


def _unmet(module: Any, worker: Any) -> Tuple[str, str]:
    """(wanted, found) of the first thing that is not as it must be, or two empty texts."""
    backends = _backends(worker.vllm_config)
    on_device = "attention backend %s on device %s" % (", ".join(backends) or "none", worker.device)
    impls = [layer.impl for layer in _layers(worker.vllm_config) if _is_ours(module, layer)]
    if not impls:
        return _WANTED, on_device
    if not module._fp8_mla_prefill_supported():
        return "%s (gfx950, AITER's mla_prefill_ps_asm_fwd and mla_reduce_v1)" % _WANTED, on_device
    refused = _refused(worker.vllm_config)
    if refused:
        return "an FP8 KV cache and a bfloat16 model", refused
    if fault.is_off(HOOK):
        return "FP8 prefill padded by us", "%d faults of ours, see there" % fault.LIMIT
    return next((unmet for unmet in map(_unmet_by, impls) if unmet[0]), ("", ""))


def _unmet_by(impl: Any) -> Tuple[str, str]:
    """The same for one attention object: asked, ours in place if needed, metadata as wide as the forward pass."""
    count, mode = impl.num_heads, _modes.get(impl.num_heads)
    wide, metadata = heads.width(count), _widths.get(count)
    if mode is None:
        return "FP8 prefill of %d heads" % count, "not asked of %s, see the faults" % ranks.release()
    if _observing():
        return "", ""
    if mode != NOT_NEEDED and not (hasattr(impl, MARK) and fault.is_wrapped(type(impl).forward_mha, HOOK)):
        return "%s of FP8 prefill of %d heads" % (mode, count), "not in place in %s, see the faults" % ranks.release()
    if metadata != wide:
        return "metadata for %d heads at %d" % (count, wide), "at %s in %s" % (metadata, ranks.release())
    return "", ""


def _layers(vllm_config: Any) -> List[Any]:
    return [layer for layer in vllm_config.compilation_config.static_forward_context.values()
            if hasattr(layer, "get_attn_backend")]


def _backends(vllm_config: Any) -> List[str]:
    return sorted({layer.get_attn_backend().get_name() for layer in _layers(vllm_config)})


def _is_ours(module: Any, layer: Any) -> bool:
    return module is not None and isinstance(getattr(layer, "impl", None), module.AiterMLAImpl)
