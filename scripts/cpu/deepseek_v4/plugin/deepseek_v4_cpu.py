"""A vLLM plugin that lets a tiny DeepSeek-V4 with dummy weights run on a CPU without Triton. For tests and the demo only.

Everything that is scored, selected or attended is the engine's own C++; what is added here:

- torch forms of five Triton kernels that compute positions and slots and have no CPU form in vLLM 0.32.0;
- two keys that the CPU's sliding-window metadata lacks there;
- the CPU's map from positions to slots works through 128 rows at a time: in one go its int64 temporaries (24 KiB a row)
  are larger than the score buffer below 26,000 tokens and would hide it from the step's peak (GPUs have none of them);
- dummy weights that differ from each other (vLLM's own round to about 0 in fp8, and every token gets the same logit);
- with DEEPSEEK_V4_SCORES=FILE, one line of JSON for each score buffer of the indexer: {"rows", "keys", "bytes"}.
"""
import collections
import json
import os

SCORES = "DEEPSEEK_V4_SCORES"
SEED = 1234
SCALE = 0.06  # of fp8 blocks: unit normal weights come out at about the usual 0.02 to 0.06
_MLA = "vllm.v1.attention.backends.mla."


def compressed_slots(out, slots, starts, lengths, blocks, stride, block_size, ranks, interleave, ratio, pad, tile):
    """Slot of the compressed key that each request's `ratio`-th token completes; `pad` for all other tokens."""
    import torch
    assert ranks == 1, "decode context parallelism has no CPU form here"
    for request in range(blocks.shape[0]):
        first, last = int(starts[request]), int(starts[request + 1])
        if last <= first:
            continue
        end = int(lengths[request])
        position = torch.arange(end - (last - first), end)
        key = position // ratio
        block = blocks[request, (key // block_size).clamp_(0, blocks.shape[1] - 1)].long()
        complete = ((position + 1) % ratio == 0) & (slots[first:last] != pad)
        out[first:last] = torch.where(complete, block * block_size + key % block_size, pad)


def prefill_chunk(starts, lengths, keys_upto, rows_upto, owner, row_start, row_end, first, last, rank, ranks, interleave,
                  tile, ratio):
    """For each token in [first, last): where its request's compressed keys start, and how far it may see."""
    import torch
    assert ranks == 1, "decode context parallelism has no CPU form here"
    for request in range(starts.shape[0] - 1):
        begin = int(starts[request])
        offset = torch.arange(int(starts[request + 1]) - begin, dtype=torch.int32)
        context = int(lengths[request]) - len(offset) + 1 + offset
        inside = (offset + begin >= first) & (offset + begin < last)
        at = (offset + begin - first)[inside].long()
        row_start[at] = rows_upto[request]
        row_end[at] = (int(rows_upto[request]) + context // ratio)[inside].to(torch.int32)
        owner[int(keys_upto[request]):int(keys_upto[request + 1])] = request


def request_of_token(starts, out, requests, mapped, tokens, **launch):
    """The request that each token belongs to; 0 from `mapped` on."""
    import torch
    token = torch.arange(tokens, dtype=torch.int32)
    request = torch.searchsorted(starts[1:requests + 1].contiguous(), token, right=True).clamp_(max=requests - 1)
    out[:tokens] = torch.where(token < mapped, request, 0).to(out.dtype)


def in_blocks(function, rows=128):
    """`function(positions, ...)` applied to `rows` rows at a time; the same result."""
    import torch

    def mapped(positions, requests, *rest):
        parts = zip(positions.split(rows), requests.split(rows), strict=True)
        out = torch.empty(positions.shape, dtype=torch.int64)
        start = 0
        for part, owners in parts:
            out[start:start + len(part)] = function(part, owners, *rest)
            start += len(part)
        return out
    return mapped


def not_read(*arguments, **launch):
    """Two kernels fill arrays for CUDA's attention only; the CPU's does not read them."""


def fill(model):
    """Normal weights of variance 1 / inputs from one seed, ones for norms, a constant for the scales of fp8 blocks."""
    import torch
    source = torch.Generator().manual_seed(SEED)
    for name, tensor in model.state_dict().items():
        eight_bits = "float8_e4m3" in str(tensor.dtype)
        if not tensor.numel() or not tensor.is_floating_point() or "cos_sin" in name or "rotary" in name:
            continue
        if "norm" in name or ("hc_" in name and name.endswith("scale")):
            tensor.fill_(1.0)
        elif "scale" in name:
            tensor.fill_(SCALE)
        elif "attn_sink" in name or "e_score_correction" in name:
            tensor.zero_()
        else:
            inputs = 1 if eight_bits or "embed" in name or tensor.ndim < 2 else tensor.shape[-1]
            tensor.copy_((torch.randn(tensor.shape, generator=source) / inputs ** 0.5).to(tensor.dtype))


def log_scores(path):
    """Appends a line to `path` for each buffer that the indexer's score kernel returns."""
    import vllm._custom_ops as ops
    kernel = ops.fp8_paged_mqa_logits_cpu
    log = open(path, "a", buffering=1)  # noqa: SIM115 - open as long as the engine runs

    def logged(*arguments):
        scores = kernel(*arguments)
        log.write(json.dumps({"rows": scores.shape[0], "keys": scores.shape[1],
                              "bytes": scores.numel() * scores.element_size()}) + "\n")
        return scores

    ops.fp8_paged_mqa_logits_cpu = logged


def prepare_worker():
    """Runs in a worker after vLLM registered its own CPU forms and before it builds the model."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.models.deepseek_v4.cpu import cpu_compressor, cpu_sparse
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder as Builder
    from vllm.triton_utils import HAS_TRITON
    from vllm.triton_utils.dispatcher import register_kernels
    if not HAS_TRITON:
        register_kernels({
            _MLA + "compressor_utils.CompressedSlotMappingKernel.kernel": compressed_slots,
            _MLA + "indexer.BuildPrefillChunkMetadataKernel.kernel": prefill_chunk,
            _MLA + "sparse_swa.ComputeSWAIndicesAndLensKernel.kernel": not_read,
            _MLA + "sparse_swa.ComputePrefillMetadataKernel.kernel": not_read,
            "vllm.v1.attention.ops.metadata._token_request_mapping_kernel": request_of_token,
        })
    original = Builder.build_tile_scheduler
    Builder.build_tile_scheduler = lambda self, tokens: collections.defaultdict(lambda: None, original(self, tokens))
    for module in (cpu_compressor, cpu_sparse):
        module.map_local_to_global_slots_cpu = in_blocks(module.map_local_to_global_slots_cpu)
    DummyModelLoader.load_weights = lambda self, model, config: fill(model)
    if os.environ.get(SCORES):
        log_scores(os.environ[SCORES])


def register():
    """Entry point of vllm.general_plugins; vLLM calls it in every process, some times twice."""
    from vllm.platforms.cpu import CpuPlatform
    original = CpuPlatform.register_triton_kernel_overrides.__func__
    if original.__module__ == __name__:
        return

    def overrides(cls):
        original(cls)
        prepare_worker()

    CpuPlatform.register_triton_kernel_overrides = classmethod(overrides)
