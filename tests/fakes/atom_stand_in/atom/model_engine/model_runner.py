"""The runner: one process for each rank."""
import os
from types import SimpleNamespace

from aiter.dist import parallel_state

from atom.config import Case

try:
    import torch
except ImportError:  # a deployment in the supervisor's own environment: nothing is sized there
    torch = None

FORM = os.environ.get("STAND_IN_ATOM", "head")
GIB = 1 << 30


def pretend(case, rank):
    """The device of a rank, as far as sizing asks for it."""
    own, cuda = case.ranks[rank], torch.cuda
    cuda.is_initialized, cuda.current_device, cuda.empty_cache = lambda: True, lambda: 0, lambda: None
    cuda.get_device_properties = lambda index: SimpleNamespace(is_integrated=False)
    cuda.mem_get_info = lambda *device: (own["free"], case.total)
    cuda.memory_stats = lambda: {"allocated_bytes.all.peak": own["peak"], "allocated_bytes.all.current": own["peak"] // 2}
    cuda.memory_reserved = lambda: own["reserved"]
    cuda.memory_allocated = lambda: own["reserved"]
    cuda.max_memory_allocated = lambda: own["peak"]
    cuda.reset_peak_memory_stats = lambda: None


class ModelRunner:
    def __init__(self, rank, config):
        self.rank, self.config, self.case = rank, config, Case()
        if "index_topk" in self.case.model:
            from atom.models import deepseek_v4  # noqa: F401 - ATOM's registry imports a model's module here
        self.device = SimpleNamespace(type="cpu", index=None)
        self.hf_text_config = config.hf_config = SimpleNamespace(**self.case.model)
        if torch is not None and self.case.ranks:
            pretend(self.case, rank)
            torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{config.port}", rank=rank,
                                                 world_size=config.tensor_parallel_size)
            parallel_state.get_tp_group().cpu_group = torch.distributed.group.WORLD
        self.forward(SimpleNamespace(is_dummy_run=True, total_tokens_num_prefill=8, total_seqs_num_prefill=1,
                                     num_cached_tokens=[0], num_scheduled_tokens=[8]))

    def _estimate_cudagraph_overhead(self):
        if self.case.fails == self.rank:
            raise ZeroDivisionError("the estimate of this rank fails")
        return self.case.graphs

    if FORM == "head":
        def _kv_budget_extra_reserve(self, total_bytes):
            return 0

        def get_num_blocks(self):
            torch.set_default_device("meta")  # ours must not depend on it
            free, total = torch.cuda.mem_get_info()
            counts = torch.cuda.memory_stats()
            torch_held = max(counts["allocated_bytes.all.peak"], counts["allocated_bytes.all.current"])
            elsewhere = max(total - free - torch.cuda.memory_reserved(), 0)
            held = torch_held + elsewhere + self._estimate_cudagraph_overhead() + int(total * 0.02)
            budget = int(total * self.config.gpu_memory_utilization) - held
            budget -= self._kv_budget_extra_reserve(total)
            torch.set_default_device("cpu")
            return {"num_kvcache_blocks": self._divide(budget, min(budget, free), free)}
    elif FORM == "2026-07-21":
        def get_num_blocks(self):
            free, total = torch.cuda.mem_get_info()
            counts = torch.cuda.memory_stats()
            torch_held = max(counts["allocated_bytes.all.peak"], counts["allocated_bytes.all.current"])
            elsewhere = max(total - free - torch.cuda.memory_reserved(), 0)
            held = torch_held + elsewhere + self._estimate_cudagraph_overhead() + int(total * 0.02)
            budget = int(total * self.config.gpu_memory_utilization) - held
            return {"num_kvcache_blocks": self._divide(budget, min(budget, free), free)}
    elif FORM == "v0.1.2":
        def get_num_blocks(self):
            free, total = torch.cuda.mem_get_info()
            counts = torch.cuda.memory_stats()
            held = max(counts["allocated_bytes.all.peak"], counts["allocated_bytes.all.current"])
            held += self._estimate_cudagraph_overhead() + int(total * 0.02)
            budget = int(total * self.config.gpu_memory_utilization) - held
            return self._divide(budget, min(budget, free), free)
    else:  # one that nobody has read
        def get_num_blocks(self):
            return torch.cuda.mem_get_info()[0] // self.case.block

    def _divide(self, budget, available, free):
        requests, utilization = self.config.max_num_seqs, self.config.gpu_memory_utilization
        state = requests * self.case.state
        if state > available:
            advice = (f"Only {free / GIB:.2f}GB is physically free on the GPU (other processes may be holding memory); raising "
                      "--gpu-memory-utilization will NOT help. Free GPU memory or " if budget > free else
                      f"Set --gpu-memory-utilization >= {utilization + 0.01:.2f} (this only zeroes out the deficit; use a "
                      "higher value for actual KV capacity) or ")
            raise RuntimeError(
                f"Per-request cache tensor ({state / GIB:.2f}GB for {requests} slots) exceeds available KV budget "
                f"({available / GIB:.2f}GB) at --gpu-memory-utilization {utilization:.2f}. {advice}reduce --max-num-seqs "
                f"(currently {requests}).")
        blocks = (available - state) // self.case.block
        assert blocks > 0, (
            f"Not enough memory for KV cache with block size({self.config.kv_cache_block_size}). At least 1 block "
            f"({self.case.block / (1 << 20):.2f}MB) is required, but available_for_kv={available / (1 << 20):.2f}MB")
        return blocks

    def forward(self, batch):
        return "stand-in"
