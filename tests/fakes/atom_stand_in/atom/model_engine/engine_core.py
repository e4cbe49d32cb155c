"""The engine core: one for each pipeline stage, with the runners of its stage."""
import sys
from types import SimpleNamespace

from atom.config import Case
from atom.model_engine.async_proc import AsyncIOProcManager


def log(text):
    print(f"[atom 10:00:00] {text}", file=sys.stderr, flush=True)


class EngineCore:
    def __init__(self, config, input_address, output_address):
        self.pipe, self.config, self.case = input_address, config, Case()
        self.scheduler = SimpleNamespace(waiting=[], running=[])
        self.runner_mgr = AsyncIOProcManager(config.tensor_parallel_size, "atom.model_engine.model_runner.ModelRunner", config)
        log(f"[rank_0] Model load done: {config.model} (weights loaded in 0.01s)")
        if self.case.ranks:
            found = self.runner_mgr.call_func("get_num_blocks")
            config.num_kvcache_blocks = found if isinstance(found, int) else found["num_kvcache_blocks"]
            log(f"Memory budget: total_gpu=1.00GB, num_kvcache_blocks={config.num_kvcache_blocks}")
        self.pipe.send("READY")
        log("Engine Core: EngineCore fully initialized and ready")

    @staticmethod
    def run_engine(config, input_address, output_address):
        core = None
        try:
            core = EngineCore(config, input_address, output_address)
            core.busy_loop()
        except Exception as error:
            log(f"run_engine: exception: {error}")
            raise
        finally:
            if core is not None:
                core.runner_mgr.exit()

    def pull_and_process_input_queue(self):
        """True to end. A runner that died answers nothing any more, and nobody is told: as in ATOM."""
        while self.pipe.poll(0.01):
            message = self.pipe.recv()
            if message is None:
                return True
            self.scheduler.waiting.append(message)
        return False

    def busy_loop(self):
        while not self.pull_and_process_input_queue():
            if self.scheduler.waiting:
                self._process_engine_step()

    def _process_engine_step(self):
        prompt = self.scheduler.waiting.pop(0)
        new = max(len(prompt.split()), 1)
        batch = SimpleNamespace(is_dummy_run=False, total_tokens_num_prefill=new, total_seqs_num_prefill=1,
                                num_cached_tokens=[0], num_scheduled_tokens=[new])
        self.pipe.send(self.runner_mgr.call_func("forward", batch))
