"""Sizes the KV cache once on all ranks of a stage: size.py TENSOR_PARALLEL PORT [MAX_NUM_SEQS]. Prints what each rank said."""
import json
import sys

from atom.config import Config
from atom.model_engine.async_proc import AsyncIOProcManager

if __name__ == "__main__":
    ranks, port, *requests = map(int, sys.argv[1:])
    config = Config("tiny", ranks, port=port, max_num_seqs=requests[0] if requests else 0)
    manager = AsyncIOProcManager(ranks, "atom.model_engine.model_runner.ModelRunner", config)
    print(json.dumps(manager.call_all("get_num_blocks")))
    manager.exit()
