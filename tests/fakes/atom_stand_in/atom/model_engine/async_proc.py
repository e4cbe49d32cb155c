"""The runners' processes: every call goes to all of them, and only rank 0's answer comes back."""
import multiprocessing
import sys
from importlib import import_module


class AsyncIOProc:
    def __init__(self, pipe, runner_qualname, rank, *args):
        self.pipe = pipe
        module, _, name = runner_qualname.rpartition(".")
        self.runner = getattr(import_module(module), name)(rank, *args)
        while True:
            name, *args = pipe.recv()
            if name == "exit":
                return
            try:
                pipe.send(("answer", getattr(self.runner, name)(*args)))
            except Exception as error:
                pipe.send(("error", f"{type(error).__name__}: {error}"))
                raise


class AsyncIOProcManager:
    def __init__(self, proc_num, runner, *args):
        context = multiprocessing.get_context("spawn")
        self.procs, self.pipes = [], []
        for rank in range(proc_num):
            ours, theirs = context.Pipe()
            process = context.Process(target=AsyncIOProc, name=f"ModelRunner{rank}/{proc_num}",
                                      args=(theirs, runner, rank, *args))
            process.start()
            theirs.close()
            self.procs.append(process)
            self.pipes.append(ours)

    def call_all(self, name, *args):
        """(kind, value) of every rank; ("error", "ended") for one that is gone."""
        for pipe in self.pipes:
            try:
                pipe.send((name, *args))
            except OSError:
                pass
        return [self._answer(pipe) for pipe in self.pipes]

    @staticmethod
    def _answer(pipe):
        try:
            return pipe.recv()
        except (EOFError, OSError):
            return ("error", "ended")

    def call_func(self, name, *args):
        answers = self.call_all(name, *args)
        for process, (kind, _) in zip(self.procs, answers, strict=True):
            if kind == "error":
                process.join(5)
                print(f"[atom 10:00:00] AsyncIOProcManager(ModelRunner): [{process.name}] proc died unexpectedly "
                      f"(exitcode={process.exitcode}), shutting down.", file=sys.stderr, flush=True)
                raise RuntimeError("a runner ended")
        return answers[0][1]

    def exit(self):
        for pipe, process in zip(self.pipes, self.procs, strict=True):
            try:
                pipe.send(("exit",))
            except OSError:
                pass
            process.join(5)
