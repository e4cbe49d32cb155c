"""What the server starts the engine cores with."""
import copy
import multiprocessing
import threading

from atom.model_engine.engine_core import EngineCore, log


class CoreManager:
    def __init__(self, config):
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes, self.lock = [], [], threading.Lock()
        for stage in range(config.pipeline_parallel_size):
            mine = copy.deepcopy(config)
            mine.parallel_config.pipeline_parallel_rank = stage
            mine.port += stage
            ours, theirs = context.Pipe()
            process = context.Process(target=EngineCore.run_engine, name=f"EngineCore-DP{stage}",
                                      kwargs={"config": mine, "input_address": theirs, "output_address": ""})
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        try:
            for pipe in self.pipes:
                pipe.recv()
        except EOFError:
            log("Engine Core Mgr: Some processes failed to start, shutting down all")
            self.close()
            raise RuntimeError("Failed to start all EngineCore processes") from None

    def generate(self, prompt):
        """Waits for ever for an engine that is gone, as ATOM does."""
        with self.lock:
            for pipe in self.pipes:
                pipe.send(prompt)
            return [pipe.recv() for pipe in self.pipes][-1]

    def close(self):
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            try:
                pipe.send(None)
            except OSError:
                pass
            process.join(5)
