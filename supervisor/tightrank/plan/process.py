"""What a rank's memory holds beside the model: its process, the server's on the first rank, buffers, graphs, workspaces. Pure.

Each is assumed until it was measured here, and says where its number comes from.
"""
from __future__ import annotations

from tightrank.adapter import heads
from tightrank.config import Config
from tightrank.config.flags import value
from tightrank.engines.base import number
from tightrank.plan import workspaces as reserved
from tightrank.plan.shape import ModelShape
from tightrank.plan.terms import ASSUMED, READ, Term
from tightrank.records import WorkerSpec

SERVER = "server of rank 0"
MIB, GIB = 2**20, 2**30
# Resident, of a rank's process with a model of 3 MB (vLLM 0.32, SGLang 0.5.23 on a CPU).
_PROCESS_BYTES = {"vllm": 1.6e9, "sglang": 0.57e9, "atom": 1.6e9}
_SERVER_BYTES = 1.3e9                  # the published analysis, 2.5: of rank 0 alone
_CONTEXT_BYTES = 0.5 * GIB             # CUDA's or HIP's own on a device, with the kernels that are loaded
_COMMUNICATOR_BYTES = 0.5 * GIB
_GRAPH_BYTES, _GRAPH_BATCH = 2 * MIB, 512
# SGLang's own sizes for devices under so many GiB: chunk, largest graph on fewer than 4 ranks and on more.
_SGLANG = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512))
_SGLANG_LARGE = (16384, 512, 512)


def whole(text: str | None) -> int | None:
    """A positive whole number of a command line."""
    return int(text) if text and text.isdigit() and len(text) < 19 and int(text) else None


def outside(spec: WorkerSpec, rank: int, ranks: int, shared: bool, cpu: bool) -> tuple[Term, ...]:
    """`shared`: memory is the host's, so that whole processes count."""
    found = []
    if shared:
        found.append(Term("process", _PROCESS_BYTES[spec.engine], "bytes", "a rank's Python process, libraries in it", ASSUMED,
                          "measured with a model of 3 MB on a CPU"))
        if rank == 0:
            found.append(Term(SERVER, _SERVER_BYTES, "bytes", "tokenizer, detokenizer and HTTP server", ASSUMED,
                              "the published analysis, 2.5"))
    if not cpu:
        found.append(Term("device context", _CONTEXT_BYTES, "bytes", "the driver's own and loaded kernels", ASSUMED,
                          "0.3 to 0.6 GiB are usual"))
        if ranks > 1:
            found.append(Term("communicator", _COMMUNICATOR_BYTES, "bytes", "buffers of NCCL or RCCL and of custom all-reduce",
                              ASSUMED, "0.14 GB where trimmed (the published analysis), 10 GB a rank on 8 MI355X"))
    return tuple(found)


def sglang_sizes(total_bytes: int, tensor_parallel: int) -> tuple[int, int]:
    """(chunk in tokens, requests in the largest graph) that SGLang chooses (arg_groups/memory_hook.py)."""
    found = next((row[1:] for row in _SGLANG if total_bytes < row[0] * GIB), _SGLANG_LARGE)
    return found[0], found[1] if tensor_parallel < 4 else found[2]


def graphs(spec: WorkerSpec, off: bool, requests: int | None, total_bytes: int) -> Term:
    """Captured for decode batches up to the most requests at once."""
    if off:
        return Term("graphs", 0, "bytes", "none are captured", READ)
    most = sglang_sizes(total_bytes, spec.tensor_parallel)[1] if spec.engine == "sglang" else _GRAPH_BATCH
    asked = whole(value(spec.argv, "--cuda-graph-max-bs", "--max-running-requests")) or requests
    batch = min(asked, most) if asked else most
    return Term("graphs", _GRAPH_BYTES * batch, "bytes", f"2 MiB for each of {batch} requests in the largest graph", ASSUMED,
                "SGLang's own reserve for them (arg_groups/memory_hook.py)")


def workspaces(config: Config, spec: WorkerSpec, shape: ModelShape, chunk: int, context: int) -> tuple[Term, ...]:
    """FP8 MLA prefill on ROCm, which the hook heads is for."""
    latent, count = shape.latent, shape.num_attention_heads
    if "heads" not in config.hooks or spec.engine != "vllm" or latent is None or not count:
        return ()
    one = heads.Shape(-(-count // spec.tensor_parallel), latent.nope_dim, latent.rope_dim, latent.value_dim, latent.rank)
    requests = number("vllm", spec.argv, "requests") or reserved.MOST_REQUESTS
    block = number("vllm", spec.argv, "page") or reserved.BLOCK_TOKENS
    found = reserved.sizes(one, chunk, context, requests, block)
    said = f"{one.heads} heads at a width of {heads.width(one.heads)}, {requests} requests"
    return tuple(Term(name, size, "bytes", said, READ, "tightrank_adapter/heads.py") for name, size in found.items())
