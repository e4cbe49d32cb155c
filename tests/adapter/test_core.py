"""The adapter's core in interpreters of its own: sitecustomize, the post-import hook, hellos, what happens to a child."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import INJECT, kill, wait_until

sys.path.insert(0, str(INJECT))
from tightrank_adapter import wire

LINE = {"budget": 1_000_000, "minimum": 64, "maximum": 1024, "granule": 64}
SCHEDULER = """
class PrefillAdder:
    def add_chunked_req(self, req): ...
    def add_one_req(self, req, has_chunked_req, truncation_align_size): ...
class AddReqResult:
    OTHER = "other"
class Scheduler:
    page_size, truncation_align_size, chunked_prefill_size, is_mixed_chunk, max_total_num_tokens = 1, None, 2048, False, 9
    def __init__(self, server_args, tp_rank, pp_rank, dp_rank):
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(gpu_id=0))
    def process_input_requests(self, requests): ...
    def run_batch(self, batch): ...
    def process_batch_result(self, batch, result): ...
    def set_internal_state(self, request): ...
"""
START = """
from sglang.srt.managers.scheduler import Scheduler
from types import SimpleNamespace
Scheduler(SimpleNamespace(enable_dp_attention=False, pp_size=1, tp_size=2), 1, 0, None)
"""


class Place:
    """A run directory and a directory behind adapter/inject on the path, for interpreters started here."""

    def __init__(self, root: Path) -> None:
        self.run, self.path = root / "run", root / "path"
        self.run.mkdir(mode=0o700)
        self.path.mkdir()
        wire.write_settings(str(self.run), wire.Settings("w", 3, "sglang", {"ranks": {}, "line": LINE}))

    def write(self, name: str, text: str) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def engine(self, scheduler: str = SCHEDULER) -> None:
        """A package `sglang` with just what the hooks look for."""
        self.write("sglang/__init__.py", "__version__ = '9.9'\n")
        self.write("sglang/srt/managers/scheduler.py", "from types import SimpleNamespace\n" + scheduler)

    def environment(self, adapter: bool = True, *before: Path) -> dict[str, str]:
        path = os.pathsep.join(map(str, (*before, INJECT, self.path)))
        return {**os.environ, "PYTHONPATH": path, **({"TIGHTRANK_ADAPTER": str(self.run)} if adapter else {})}

    def python(self, code: str, adapter: bool = True, *before: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code], env=self.environment(adapter, *before), text=True,
                              capture_output=True, timeout=60, check=False)

    def hellos(self) -> list[wire.Hello]:
        return [wire.read_json(str(path), wire.Hello) for path in self.run.glob("hello-*.json")]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize("adapter", [True, False])
def test_the_displaced_sitecustomize_always_runs_as_itself(place: Place, adapter: bool) -> None:
    place.write("sitecustomize.py", "import sys; SEEN = __name__, __file__, sys.modules['sitecustomize'].__file__")
    done = place.python("import sitecustomize, sys; print(*sitecustomize.SEEN, 'tightrank_adapter' in sys.modules)", adapter)
    own = str(place.path / "sitecustomize.py")
    assert done.stdout.split() == ["sitecustomize", own, own, str(adapter)]
    assert not done.stderr


def test_a_displaced_sitecustomize_that_raises_does_what_it_did_without_us(place: Place) -> None:
    place.write("sitecustomize.py", "raise ValueError('broken before')")
    done = place.python("import sys; print(sys.modules['tightrank_adapter.boot']._started)")
    assert done.stdout == "True\n"
    assert "broken before" in done.stderr and "tightrank" not in done.stderr
    place.write("sitecustomize.py", "raise SystemExit(7)")
    alone = subprocess.run([sys.executable, "-c", "print('on')"], capture_output=True, text=True, timeout=60, check=False,
                           env={**os.environ, "PYTHONPATH": str(place.path)})
    done = place.python("print('on')")
    assert (done.returncode, done.stdout) == (alone.returncode, alone.stdout) and alone.returncode


def test_two_adapters_on_the_path_end_with_the_displaced_one(place: Place, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text((INJECT / "sitecustomize.py").read_text())
    place.write("sitecustomize.py", "print('displaced')")
    assert place.python("print('on')", True, other).stdout == "displaced\non\n"


def test_without_a_stderr_a_refused_run_directory_costs_neither_the_process_nor_the_displaced_one(place: Place) -> None:
    place.write("sitecustomize.py", "print('displaced')")
    place.run.chmod(0o755)
    done = subprocess.run(["sh", "-c", f"exec {sys.executable} -c \"print('on')\" 2>&-"], env=place.environment(), text=True,
                          stdout=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "displaced\non\n")


def test_the_start_imports_nothing_that_costs(place: Place) -> None:
    code = (
        "import sys; print(*(n for n in ('json', 'socket', 'ctypes', 'threading', 'typing', 'mmap') if n in sys.modules))")
    without = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60, check=True)
    assert set(place.python(code).stdout.split()) - set(without.stdout.split()) <= {"typing"}


@pytest.mark.parametrize("mode", [0o755, 0o770, None])
def test_a_run_directory_that_is_not_private_is_refused_in_one_line(place: Place, mode: int | None) -> None:
    place.engine()
    if mode is None:
        (place.run / wire.SETTINGS).unlink()
        place.run.rmdir()
    else:
        place.run.chmod(mode)
    done = place.python(START + "print('on')")
    assert done.stdout == "on\n"
    assert len(done.stderr.splitlines()) == 1 and str(place.run) in done.stderr
    assert not place.hellos()


def test_settings_of_another_schema_are_named_and_the_engine_starts(place: Place) -> None:
    place.engine()
    (place.run / wire.SETTINGS).write_text('{"schema": 99}')
    done = place.python(START + "print('on')")
    assert done.stdout == "on\n" and "schema 99" in done.stderr
    assert not place.hellos()


def test_a_scheduler_says_hello_with_its_hooks_in_force(place: Place) -> None:
    place.engine()
    assert place.python(START).stderr == ""
    [hello] = place.hellos()
    assert (hello.role, hello.rank, hello.tp_rank, hello.engine_version) == ("scheduler", 1, 1, "9.9")
    assert (hello.worker, hello.generation) == ("w", 3)
    assert {name: hook["state"] for name, hook in hello.hooks.items()} == {"ranks": "in-force", "line": "in-force"}
    assert hello.facts == {"kv_tokens": 9, "line_budget": 1_000_000, "granule_tokens": 64, "maximum_tokens": 1024}
    assert {path.stat().st_mode & 0o777 for path in place.run.iterdir()} == {0o600}


@pytest.mark.parametrize(("old", "new", "hook", "wanted"), [
    ("def add_one_req(", "def add_request(", "line", "PrefillAdder.add_one_req"),
    ("def set_internal_state(", "def set_state(", "line", "Scheduler.set_internal_state"),
    ("2048, False", "None, False", "line", "--chunked-prefill-size"),
    ("2048, False", "32, False", "line", "--chunked-prefill-size of at least 64"),
    ("def run_batch(", "def run(", "ranks", "Scheduler.run_batch"),
])
def test_what_a_release_lacks_fails_the_hook_by_name(place: Place, old: str, new: str, hook: str, wanted: str) -> None:
    assert old in SCHEDULER
    place.engine(SCHEDULER.replace(old, new))
    assert place.python(START + "print('on')").stdout == "on\n"
    [hello] = place.hellos()
    assert hello.hooks[hook]["state"] == "failed"
    assert wanted in hello.hooks[hook]["wanted"]
    assert hello.hooks[hook]["found"] in ("no such attribute in sglang 9.9", "chunked prefill is off", "32")


def test_an_override_without_the_hook_is_found(place: Place) -> None:
    place.engine(SCHEDULER + """
class Other(PrefillAdder):
    def add_one_req(self, req, has_chunked_req, truncation_align_size): ...
Scheduler.get_prefill_adder_class = lambda self: Other
""")
    place.python(START)
    [hello] = place.hellos()
    assert hello.hooks["line"] == {"state": "failed", "wanted": "Other.add_one_req", "found": "an override without the hook"}


def test_the_engines_own_doors_lead_to_the_same_start(place: Place) -> None:
    place.engine()
    done = place.python("""
from importlib.metadata import entry_points
for group in ("sglang.srt.plugins", "vllm.general_plugins"):
    [door] = [each for each in entry_points(group=group) if each.name == "tightrank"]
    door.load()()
""" + START)
    assert done.stderr == ""
    assert len(place.hellos()) == 1


def test_spawned_children_have_the_hooks(place: Place) -> None:
    place.engine()
    place.write("child.py", "def run():\n" + "".join("    " + line + "\n" for line in START.strip().splitlines()))
    done = place.python("""
if __name__ == "__main__":
    import multiprocessing, child
    process = multiprocessing.get_context("spawn").Process(target=child.run)
    process.start(); process.join(); print(process.exitcode)
""")
    assert done.stdout == "0\n", done.stderr
    assert [hello.role for hello in place.hellos()] == ["scheduler"]


def test_a_forked_child_is_nobody(place: Place) -> None:
    place.engine()
    done = place.python(START + """
import os
from tightrank_adapter import rank
before = open(f"{rank.directory()}/hello-{os.getpid()}.json").read()
if os.fork() == 0:
    rank.fact("child", 1); rank.beat(5); rank.step([[0, 5]], 9, False, 1.0, None)
    os._exit(0 if rank.number() is None else 1)
print(os.wait()[1], open(f"{rank.directory()}/hello-{os.getpid()}.json").read() == before)
""")
    assert done.stdout == "0 True\n", done.stderr
    assert len(place.hellos()) == 1


@pytest.fixture
def child(place: Place) -> Iterator[Callable[[str], int]]:
    """Starts a parent whose spawned child says hello in a role; gives the child's pid, the parent being dead by then."""
    children: list[int] = []

    def start(role: str) -> int:
        place.write("child.py", f"""
def run():
    import time
    from tightrank_adapter import rank
    rank.hello({role!r})
    time.sleep(600)
""")
        code = "import multiprocessing as m, child; m.get_context('spawn').Process(target=child.run).start()"
        parent = subprocess.Popen([sys.executable, "-c", code], env=place.environment())
        [hello] = wait_until(place.hellos, 30, "the child's hello")
        children.append(hello.pid)
        parent.kill()
        parent.wait()
        return hello.pid

    yield start
    for pid in children:
        kill(pid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_rank_dies_with_its_parent(child: Callable[[str], int]) -> None:
    pid = child("engine-core")
    wait_until(lambda: not is_running(pid), 10, "the child is gone")


def test_a_rank_that_a_fork_server_made_is_no_orphan(place: Place) -> None:
    """The server, not the process that asked for it, is its parent."""
    place.write("child.py", "def run():\n    from tightrank_adapter import rank\n    rank.hello('engine-core')\n")
    done = place.python("import multiprocessing as m, child; p = m.get_context('forkserver').Process(target=child.run); "
                        "p.start(); p.join(); print(p.exitcode)")
    assert done.stdout == "0\n", done.stderr
    assert [hello.role for hello in place.hellos()] == ["engine-core"]


IMPORTS = """
import sys
from tightrank_adapter import imports
seen = []
imports.after_import("target", lambda module: seen.append(module.VALUE))
"""


def test_a_module_is_handed_over_once_and_looks_untouched(place: Place) -> None:
    place.write("target.py", "VALUE = 1\nclass Thing: pass\n")
    done = place.python(IMPORTS + """
import target, inspect, pickle, importlib.machinery
imports.after_import("target", lambda module: seen.append("at once"))
assert type(target.__loader__) is importlib.machinery.SourceFileLoader and target.__spec__.loader is target.__loader__
assert "exec_module" not in vars(target.__loader__)
assert inspect.getsource(target.Thing).startswith("class Thing")
assert type(pickle.loads(pickle.dumps(target.Thing()))) is target.Thing
print(seen)
""")
    assert done.stdout == "[1, 'at once']\n", done.stderr


def test_a_failed_import_leaves_the_next_one_to_fire(place: Place) -> None:
    place.write("target.py", "import os\nif 'BROKEN' in os.environ: raise ImportError('not yet')\nVALUE = 2\n")
    done = place.python(IMPORTS + """
import os, importlib.util
os.environ["BROKEN"] = "1"
try:
    import target
except ImportError: pass
assert importlib.util.find_spec("target") is not None and importlib.util.find_spec("no_such_module") is None
del os.environ["BROKEN"]
import target
print(seen)
""")
    assert done.stdout == "[2]\n", done.stderr


def test_another_finder_that_asks_the_others_does_not_go_round(place: Place) -> None:
    place.write("target.py", "VALUE = 3\n")
    done = place.python("""
import sys
class Asking:
    def find_spec(self, name, path=None, target=None):
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)):
                return spec
""" + IMPORTS + "sys.meta_path.insert(0, Asking())\nimport target\nprint(seen)")
    assert done.stdout == "[3]\n", done.stderr


def test_a_callback_that_raises_fails_its_hook_and_not_the_import(place: Place) -> None:
    place.engine()
    place.write("tightrank_broken.py", "def install(module): raise RuntimeError('ours is broken')\n")
    done = place.python("""
from tightrank_adapter import boot, fault, imports, rank
imports.after_import("sglang.srt.managers.scheduler", fault.contained("line", "tightrank_broken", boot._resolve,
                                                                      "tightrank_broken:install"))
""" + START + "print('on')")
    assert done.stdout == "on\n", done.stderr
    [hello] = place.hellos()
    assert hello.hooks["line"]["state"] == "failed" and "ours is broken" in hello.hooks["line"]["found"]
    assert hello.facts["faults"][0]["where"] == "tightrank_broken"
