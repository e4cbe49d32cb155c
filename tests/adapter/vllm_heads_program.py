"""Run with the Python of vLLM's environment and one release on PYTHONPATH: its ROCm AITER MLA backend on a CPU.

The backend's own classes are made by their own constructors (the base classes' part is stood in for), and AITER is a
stand-in whose kernels keep the contract of the real ones: 16-aligned heads, packed FP8 inputs, bf16 written into the
output they are handed, every head for itself, scratch overwritten. One fork for each scenario on standard input;
answers as JSON on standard output.
"""
from __future__ import annotations

import itertools
import json
import math
import os
import sys
import types
from types import SimpleNamespace as Bag
from typing import Any

import torch

torch.set_num_threads(1)
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
NOPE, ROPE, VALUE, LATENT, ALIGN = 16, 8, 16, 32, 16
STARTS = [0, 3, 5]      # two requests of 3 and 2 tokens
FROM_BF16_PATH = 7.0    # what the engine's bf16 path answers here
seen: dict[str, Any] = {}
gfx = {"none": False, "fused": False}    # no gfx950; AITER has the fused form


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One head of one request, causal: the same operations whatever other heads there are."""
    scores = (q.float() @ k.float().T).masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v.float()).to(BF16)


def per_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    for start, end in itertools.pairwise(STARTS):
        for head in range(q.shape[1]):
            out[start:end, head] = attention(q[start:end, head], k[start:end, head], v[start:end, head])


def asm_prefill(q: Any, k: Any, v: Any, qo_indptr: Any, *rest: Any) -> None:
    logits, lse, out = rest[7:10]
    seen["forward_width"] = q.shape[1]
    for each in (q, k, v):
        assert each.dtype == FP8 and each.is_contiguous(), (each.dtype, each.stride())
    assert q.shape[1] % ALIGN == 0 and k.shape[1] == v.shape[1] == out.shape[1] == logits.shape[1] == lse.shape[1] == q.shape[1]
    assert out.is_contiguous()
    per_head(q, k, v, out.view(torch.uint16).view(BF16))  # bf16 bits by bare pointer, whatever dtype it is
    logits.fill_(torch.nan)
    lse.fill_(torch.nan)


def reduce(logits: Any, lse: Any, *rest: Any) -> None:
    out, final_lse = rest[-2:]
    assert out.shape[1] == final_lse.shape[1] == seen["forward_width"]
    final_lse.fill_(torch.nan)


def ps_info(batch_size: int, num_head_k: int, max_qlen: int, qlen_granularity: int = 256) -> Any:
    seen["metadata_width"] = num_head_k
    per = 256 // math.gcd(num_head_k, 256)
    split = -(-max_qlen // qlen_granularity)
    works, partials = (batch_size + per - 1) * split * num_head_k, min(batch_size + per - 1, 2 * (per - 1)) * split
    return ((2, torch.uint64), (257, torch.int32), ((works, 8), torch.int32), (batch_size * split + 1, torch.int32),
            ((batch_size * split, 2), torch.int32), (partials, torch.int32))


def ps_fill(*args: Any, **kwargs: Any) -> None:
    seen["plan_width"] = args[4]
    args[8].fill_(2)  # reduce_indptr: two partial tiles


def fused(q: Any, k_nope: Any, v: Any, k_pe: Any, width: int, form: Any) -> Any:
    """AITER's one-launch form: padded head h is real head h % heads."""
    index = torch.arange(width) % q.shape[1]
    k = torch.cat([k_nope, k_pe.expand(-1, k_nope.shape[1], -1)], -1)
    return tuple(each.to(form).view(torch.uint8).index_select(1, index).view(form) for each in (q, k, v))


def fake_aiter() -> None:
    """After vLLM's import: it asks find_spec for aiter, which a module made by hand has no answer for."""
    path = "aiter.ops.triton.fusions.fused_mla_prefill_qkv_fp8"
    names = path.split(".")
    for length in range(1, len(names) + 1):
        sys.modules[".".join(names[:length])] = types.ModuleType(".".join(names[:length]))
    sys.modules[path].fused_mla_prefill_qkv_fp8 = fused
    decode = ((1, torch.int32),) * 6
    vars(sys.modules["aiter"]).update(
        mla_prefill_ps_asm_fwd=asm_prefill, mla_reduce_v1=reduce, get_ps_metadata_info_v1=ps_info,
        get_ps_metadata_v1=ps_fill, flash_attn_varlen_func=None, get_mla_metadata_info_v1=lambda *args, **kwargs: decode,
        dtypes=Bag(fp8=FP8, fp16=torch.float16, bf16=BF16))


def base_impl(self: Any, num_heads: int, head_size: int, scale: float, kv_heads: int, slopes: Any, window: Any,
              kv_cache_dtype: str, *rest: Any, **mla: Any) -> None:
    vars(self).update(num_heads=num_heads, scale=1.0, kv_cache_dtype=kv_cache_dtype, v_head_dim=VALUE, dcp_world_size=1,
                      qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, kv_lora_rank=LATENT, _use_flashinfer_concat_mla_k=False,
                      **mla)


def base_builder(self: Any, spec: Any, names: Any, vllm_config: Any, device: Any, *rest: Any, **more: Any) -> None:
    vars(self).update(num_heads=vllm_config.heads, vllm_config=vllm_config, model_config=vllm_config.model_config,
                      mla_dims=Bag(v_head_dim=vllm_config.value, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE,
                                   qk_rope_head_dim=ROPE),
                      reorder_batch_threshold=1, dcp_world_size=1, q_data_type=BF16, device=device, kv_cache_spec=spec)


def base_build(self: Any, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
    metadata = object.__new__(self.module.AiterMLAMetadata)
    backend = Bag(run_prefill_new_tokens=lambda q, k, v, **more: torch.full_like(v, FROM_BF16_PATH))
    metadata.prefill = Bag(chunked_context=None, max_query_len=3, query_start_loc=torch.tensor(STARTS, dtype=torch.int32),
                           q_data_type=BF16, prefill_backend=backend)
    metadata.decode, metadata.num_decodes = None, 0
    return metadata


def with_context(module: Any, impl: Any, builder: Any) -> None:
    """The next batch continues a prompt: its part over the context and the merge are stood in for."""
    import vllm.model_executor.layers.attention.mla_attention as common

    def build(self: Any, *args: Any) -> Any:
        metadata = base_build(self, *args)
        metadata.prefill.chunked_context = Bag(chunks=[])
        backend = metadata.prefill.prefill_backend
        backend.run_prefill_new_tokens = lambda q, k, v, **more: (torch.zeros_like(v), None)
        return metadata

    module.MLACommonMetadataBuilder.build = build
    impl._compute_prefill_context = lambda q, *args, **kwargs: (torch.zeros(len(q), impl.num_heads, VALUE), None)
    common.merge_attn_states = lambda output, **kwargs: output.fill_(FROM_BF16_PATH)


class Event:
    def synchronize(self) -> None:
        pass

    record = synchronize


def prepare() -> Any:
    """The backend's module, its surroundings made for a CPU."""
    import vllm.v1.attention.backends.mla.rocm_aiter_mla as module
    import vllm.v1.worker.gpu_worker  # noqa: F401 - before aiter is stood in for
    from vllm.platforms import current_platform
    from vllm.v1.worker.workspace import init_workspace_manager
    fake_aiter()
    module.MLACommonImpl.__init__ = base_impl
    module.MLACommonMetadataBuilder.__init__, module.MLACommonMetadataBuilder.build = base_builder, base_build
    module.MLACommonMetadataBuilder.module = module
    rocm = types.ModuleType("vllm.platforms.rocm")  # the real one asks a GPU at its import
    vars(rocm).update(on_gfx942=lambda: False, on_gfx950=lambda: not gfx["none"], get_cdna_version=lambda: 4)
    sys.modules[rocm.__name__] = rocm
    module._fused_mla_prefill_qkv_supported = lambda: gfx["fused"]
    module.rocm_aiter_ops.is_enabled = classmethod(lambda cls: gfx["fused"])
    type(current_platform).num_compute_units = classmethod(lambda cls, *args: 256)
    torch.accelerator.empty_cache = lambda: None
    empty = torch.empty
    torch.empty = lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
    torch.cuda.Event = Event
    init_workspace_manager(torch.device("cpu"), 1)
    return module


def config(heads: int, cache: str, dtype: torch.dtype, value: int = VALUE) -> Any:
    return Bag(heads=heads, value=value, cache_config=Bag(cache_dtype=cache, num_gpu_blocks=None, block_size=16),
               model_config=Bag(dtype=dtype, max_model_len=512), speculative_config=None,
               scheduler_config=Bag(max_num_seqs=1, max_num_batched_tokens=512),
               parallel_config=Bag(decode_context_parallel_size=1, cp_kv_cache_interleave_size=1),
               compilation_config=Bag(cudagraph_mode=Bag(has_full_cudagraphs=lambda: False), static_forward_context={}))


def reserved() -> int:
    from vllm.v1.worker import workspace
    return sum(each.numel() for each in workspace._manager._current_workspaces if each is not None)


def one(module: Any, heads: int, options: dict[str, Any]) -> dict[str, Any]:
    """A layer and its metadata builder made by the release, one prefill run through them, every head compared."""
    from vllm.v1.worker import workspace
    seen.clear()
    workspace._manager._current_workspaces = [None] * len(workspace._manager._current_workspaces)
    dtype = getattr(torch, options.get("dtype", "bfloat16"))
    settings = config(heads, options.get("cache", "fp8"), dtype)
    if options.get("lift"):
        module.AiterMLAHelper.is_valid_num_heads = staticmethod(lambda count: count > 0)
    generator = torch.Generator().manual_seed(heads)
    latent = torch.randn(STARTS[-1], LATENT, generator=generator).to(dtype)
    weight = torch.randn(LATENT, heads * (NOPE + VALUE), generator=generator).to(dtype)
    q = torch.randn(STARTS[-1], heads, NOPE + ROPE, generator=generator).to(dtype)
    k_pe = torch.randn(STARTS[-1], 1, ROPE, generator=generator).to(dtype)
    impl = module.AiterMLAImpl(heads, NOPE + ROPE, 1.0, 1, None, None, settings.cache_config.cache_dtype, None, "decoder",
                               None, kv_b_proj=lambda rows: (rows @ weight,))
    builder = module.AiterMLAMetadataBuilder(Bag(block_size=1, dtype=dtype, page_size_bytes=1), ["layer"], settings,
                                             torch.device("cpu"))
    held = reserved()
    workspace._manager.lock()
    if options.get("context"):
        with_context(module, impl, builder)
    metadata = builder.build(0, Bag(query_start_loc_cpu=torch.tensor(STARTS), causal=True))
    out = torch.zeros(STARTS[-1], heads * VALUE, dtype=dtype)
    impl.forward_mha(q, latent, k_pe, None, metadata, None, output=out)
    workspace._manager.unlock()
    keys, values = (latent @ weight).view(-1, heads, NOPE + VALUE).split([NOPE, VALUE], -1)
    wanted = torch.empty(STARTS[-1], heads, VALUE, dtype=BF16)
    per_head(q.to(FP8), torch.cat([keys, k_pe.expand(-1, heads, -1)], -1).to(FP8), values.to(FP8), wanted)
    found = out.view(-1, heads, VALUE)
    return {"wrong": [head for head in range(heads) if not torch.equal(found[:, head].to(BF16), wanted[:, head])],
            "path": "bf16" if bool((out == FROM_BF16_PATH).all()) else "fp8" if "forward_width" in seen else "none",
            **{name: seen.get(name) for name in ("forward_width", "metadata_width", "plan_width")}, "reserved": held,
            "made": (settings, Bag(impl=impl, get_attn_backend=lambda: module.AiterMLABackend))}


def hook(module: Any, options: dict[str, Any]) -> Any:
    """The adapter in this process, as boot.py would put it there: gpu_worker's Worker, whose start settles the state."""
    sys.path.insert(0, os.environ["TIGHTRANK_INJECT"])
    from tightrank_adapter import fault, rank
    from tightrank_adapter.vllm import heads
    from vllm.v1.worker import gpu_worker
    rank.settings(options["directory"])
    gpu_worker.Worker.initialize_from_config = lambda self, config: None
    fault.contained("heads", "worker", heads.worker)(gpu_worker)
    fault.contained("heads", "install", heads.install)(module)
    rank.hello("worker", rank=0)
    return gpu_worker.Worker


def settle(owner: Any, settings: Any) -> None:
    worker = object.__new__(owner)
    worker.vllm_config, worker.device = settings, "cpu"
    worker.initialize_from_config(None)


def scenario(module: Any, options: dict[str, Any]) -> dict[str, Any]:
    """`options`: counts, directory (absent: no adapter), and those of `one`."""
    gfx.update(none=options.get("no_gfx950", False), fused=options.get("fused", False))
    if options.get("without"):
        delattr(getattr(module, options["without"][0]), options["without"][1])
    if options.get("gated"):  # off for the release's own code, for a reason that we do not know
        module._fp8_mla_prefill_supported = lambda: "rocm_aiter_mla" not in sys._getframe(1).f_code.co_filename
    worker = hook(module, options) if "directory" in options else None
    answers: dict[str, Any] = {}
    layers: dict[str, Any] = {name: Bag(impl=None, get_attn_backend=lambda name=name: Bag(get_name=lambda: name))
                              for name in options.get("backends", ())}
    settings = config(16, "fp8", BF16)
    for heads in options["counts"]:
        try:
            answers[str(heads)] = one(module, heads, options)
            settings, layer = answers[str(heads)].pop("made")
            layers[str(heads)] = layer
        except Exception as error:
            answers[str(heads)] = {"error": "%s: %s" % (type(error).__name__, error)}
    settings.compilation_config.static_forward_context = layers
    if worker is not None:
        settle(worker, settings)
    return answers


def sizes(module: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Bytes reserved by a metadata builder in the published setting (value dimension 128)."""
    from vllm.v1.worker import workspace
    module.AiterMLAHelper.is_valid_num_heads = staticmethod(lambda count: count > 0)
    if "directory" in options:
        hook(module, options)
    answers = {}
    for heads in options["counts"]:
        workspace._manager._current_workspaces = [None] * len(workspace._manager._current_workspaces)
        module.AiterMLAImpl(heads, NOPE + ROPE, 1.0, 1, None, None, "fp8", None, "decoder", None)
        module.AiterMLAMetadataBuilder(Bag(block_size=1, dtype=BF16, page_size_bytes=1), ["layer"],
                                       config(heads, "fp8", BF16, 128), torch.device("cpu"))
        answers[str(heads)] = reserved()
    return answers


def fallback(module: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Peak bytes that the release's own bf16 path allocates for [new tokens, keys of each context chunk]."""
    import vllm.model_executor.layers.attention.mla_attention as common
    common.ops = Bag(gather_and_maybe_dequant_cache=lambda **kwargs: None, gather_mla_context_cache_cpu=lambda **kwargs: None)
    common.merge_attn_states = lambda **kwargs: None
    common._get_kv_b_proj_input_dtype = lambda *args: None  # bf16 as the workspace
    return {name: measured(module, common, *case) for name, case in options["cases"].items()}


def measured(module: Any, common: Any, heads: int, tokens: int, chunks: list[int]) -> int:
    def attend(q: Any, k: Any, v: Any, return_softmax_lse: bool = True, **more: Any) -> Any:
        out = torch.empty(len(q), heads, VALUE, dtype=BF16)
        return (out, torch.empty(heads, len(q))) if return_softmax_lse else out

    impl = object.__new__(module.AiterMLAImpl)
    base_impl(impl, heads, NOPE + ROPE, 1.0, 1, None, None, "auto",
              kv_b_proj=lambda rows: (torch.empty(len(rows), heads * (NOPE + VALUE), dtype=BF16),))
    context = Bag(workspace=torch.empty(max(chunks, default=1), LATENT + ROPE, dtype=BF16), empty_token_slices=[], chunks=[
        Bag(num_context_tokens=size, request_slice=slice(0, 1), token_slice=slice(0, tokens), is_continuation=index > 0,
            continuation_token_end=tokens, cu_seq_lens=None, token_to_seq=None, starts=None, num_requests=1)
        for index, size in enumerate(chunks)])
    prefill = Bag(chunked_context=context if chunks else None, q_data_type=BF16, block_table=torch.zeros(1, 1),
                  prefill_backend=Bag(run_prefill_new_tokens=attend, run_prefill_context_chunk=attend))
    given = (torch.empty(tokens, heads, NOPE + ROPE, dtype=BF16), torch.empty(tokens, LATENT, dtype=BF16),
             torch.empty(tokens, 1, ROPE, dtype=BF16), None, Bag(prefill=prefill), None,
             torch.empty(tokens, heads * VALUE, dtype=BF16))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        common.MLACommonImpl.forward_mha(impl, *given)
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))


def forked(module: Any, options: dict[str, Any]) -> Any:
    """The answer of a child, so that one import of vLLM serves all scenarios."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = globals()[options.get("what", "scenario")](module, options)
        except BaseException as error:
            answer = {"crash": "%s: %s" % (type(error).__name__, error)}
        with os.fdopen(writer, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"crash": "no answer"}


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    backend = prepare()
    json.dump({name: forked(backend, options) for name, options in asked.items()}, sys.stdout)
