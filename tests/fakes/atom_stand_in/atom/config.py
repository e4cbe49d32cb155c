"""The configuration that ATOM hands from process to process, and what a test wants of this run."""
import json
import os
from types import SimpleNamespace

MIB = 1 << 20


class Case:
    """STAND_IN_CASE, in MiB: "total", and for each rank "free", "peak" (weights and the warm-up), "reserved" (by torch).

    "graphs", "state" (for each request), "block"; "fails": a rank whose estimate for graphs raises; "late": seconds for which
    the open port refuses completions; "model": of its configuration.
    """

    def __init__(self):
        found = json.loads(os.environ.get("STAND_IN_CASE", "{}"))
        self.total = found.get("total", 0) * MIB
        self.ranks = [{name: size * MIB for name, size in rank.items()} for rank in found.get("ranks", [])]
        self.graphs, self.state, self.block = (found.get(name, size) * MIB for name, size in
                                               (("graphs", 0), ("state", 0), ("block", 1)))
        self.fails, self.late, self.model = found.get("fails"), found.get("late", 0), found.get("model", {"index_topk": 2048})


class Config:
    def __init__(self, model, tensor_parallel_size=1, pipeline_parallel_size=1, gpu_memory_utilization=0.9, max_num_seqs=512,
                 max_model_len=8192, port=8006):
        self.model, self.tensor_parallel_size, self.pipeline_parallel_size = model, tensor_parallel_size, pipeline_parallel_size
        self.gpu_memory_utilization, self.max_num_seqs, self.max_model_len = gpu_memory_utilization, max_num_seqs, max_model_len
        self.kv_cache_block_size, self.num_kvcache_blocks, self.port = 16, 0, port
        self.parallel_config = SimpleNamespace(pipeline_parallel_rank=0, data_parallel_rank=0)
