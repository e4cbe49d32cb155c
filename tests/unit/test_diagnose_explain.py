"""`tightrank explain`: prefixes, engines, lives and services of a log; bad files; what its JSON has."""
from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tightrank.cli import main
from tightrank.diagnose.log import explain
from tightrank.diagnose.peel import peel
from tightrank.diagnose.text import without_secrets
from tightrank.errors import ConfigError

CONTEXT = ("(EngineCore pid=2) ERROR 11-30 10:00:30 [core.py:1510] ValueError: To serve at least one request with the model's "
           "max seq len (8192), (2.5 GiB KV cache is needed, which is larger than the available KV cache memory (1.0 GiB). "
           "Based on the available memory, the estimated maximum model length is 3264. Try increasing")
START = ["(APIServer pid=1) INFO 11-30 10:00:01 [api_utils.py:286] non-default args: {'model': 'm'}",
         "(EngineCore pid=2) INFO 11-30 10:00:10 [core.py:134] Initializing a V1 LLM engine (v0.32.0)"]
FAILED = [*START, "(EngineCore pid=2) ERROR 11-30 10:00:30 [core.py:1510] EngineCore failed to start.", CONTEXT]
SERVED = [*START, "(APIServer pid=1) INFO:     Application startup complete."]
WORK = "(APIServer pid=1) INFO 11-30 10:{:02}:{:02} [loggers.py:248] Engine 000: Avg prompt throughput: 1.0 tokens/s"
OOM = "(EngineCore pid=2) ERROR 11-30 {} [core.py:1510] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def cause(lines: list[str], engine: str | None = None, code: int | None = None) -> str:
    return explain(lines, engine, code).diagnosis.cause


@pytest.mark.parametrize("form", [
    "{}", "worker-1  | {}", "app_worker_1   | {}", "\x1b[36mworker-1  |\x1b[0m {}", "2026-11-30T10:00:30.123456789Z {}",
    "2026-11-30T11:00:30.1+01:00 {}", "2026-11-30T10:00:30.123456789Z stderr F {}", "worker-1  | 2026-11-30T10:00:30.1Z {}",
    "[pod/vllm-0/engine] {}", "[pod/vllm-0/engine] 2026-11-30T10:00:30Z {}", "Nov 30 10:00:30 host7 vllm[123]: {}",
    "Nov  3 10:00:30 host7 docker.service[123]: {}", "2026-11-30T10:00:30.123Z {}"])
def test_what_keepers_of_logs_write_in_front_is_peeled(form: str) -> None:
    found = explain([form.format(line) for line in FAILED])
    assert (found.engine, found.diagnosis.cause) == ("vllm", "context-exceeds-kv-pool")
    assert found.diagnosis.evidence == (CONTEXT,)


def test_lines_of_docker_s_own_files() -> None:
    lines = [json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-11-30T10:00:30.123456789Z"}) for line in FAILED]
    assert cause(lines) == "context-exceeds-kv-pool"
    assert cause([*lines, '{"log": 7}', '{"log": "cut', '{"log":null,"time":3}']) == "context-exceeds-kv-pool"


@pytest.mark.parametrize("raw", ["Loading safetensors checkpoint shards: 100% Completed | 4/4 [00:09<00:00,  2.31s/it]",
                                 "  | ValueError: x", "[2026-11-30 10:00:00 TP0] Prefill batch", "[Gloo] Rank 0 is connected",
                                 "[1764496800.123456] [host7:881:0]  ib_md.c:309  UCX  ERROR x", "(EngineCore pid=2) INFO x"])
def test_what_an_engine_prints_itself_is_left(raw: str) -> None:
    assert peel(raw).text == raw and peel(raw).source == "" and not peel(raw).kernel


@pytest.mark.parametrize("raw", ["[12345.678901] oom-kill:x", "[Mon Nov 30 10:00:00 2026] oom-kill:x",
                                 "Nov 30 10:00:00 host7 kernel: oom-kill:x", "Nov 30 10:00:00 host7 kernel: [12345.678901] "
                                 "oom-kill:x"])
def test_lines_of_the_kernel_are_known(raw: str) -> None:
    assert peel(raw).kernel and peel(raw).text == "oom-kill:x"


def test_a_kernel_line_in_the_same_file_counts() -> None:
    lines = [*START, "Nov 30 10:00:31 host7 kernel: oom-kill:constraint=CONSTRAINT_NONE,cpuset=/,task=python3,pid=42,uid=0"]
    found = explain(lines, code=137).diagnosis
    assert (found.cause, found.confidence) == ("killed-by-oom", "likely")


@pytest.mark.parametrize(("lines", "engine"), [
    (FAILED, "vllm"), (["[2026-11-30 10:00:01] server_args={'model_path': 'm'}"], "sglang"),
    (["[atom 10:00:01] Initializing engine with model m"], "atom")])
def test_the_engine_is_told_by_its_lines(lines: list[str], engine: str) -> None:
    found = explain(lines)
    assert found.engine == engine and "look like it" in found.engine_told_by


@pytest.mark.parametrize("lines", [[], ["hello"], ["vLLM", "SGLang"]])
def test_an_engine_that_cannot_be_told_is_asked_for(lines: list[str]) -> None:
    with pytest.raises(ConfigError, match="--engine vllm, sglang or atom"):
        explain(lines)
    assert cause(lines, "vllm") == "unknown"


def test_without_a_sign_of_failure_nothing_is_said_to_have_failed() -> None:
    found = explain([*SERVED, *[WORK.format(1, second) for second in range(50)]]).diagnosis
    assert (found.cause, found.confidence) == ("unknown", "guess") and "Nothing in these lines" in found.summary


@pytest.mark.parametrize("code", [137, -9])
def test_the_exit_code_says_that_it_ended(code: int) -> None:
    found = explain(SERVED, code=code).diagnosis
    assert found.cause == "engine-exited" and "SIGKILL" in found.summary


def test_an_exception_that_was_survived_is_no_failure_of_a_start() -> None:
    survived = ["ImportError: libfoo.so.1: cannot open shared object file: No such file or directory", *START]
    assert cause(survived) == "unknown"
    assert cause(survived[:1], "vllm", 1) == "libraries-mismatched"


def test_the_last_life_that_failed_counts() -> None:
    quiet = [WORK.format(1, second % 60) for second in range(60)]
    again = [*FAILED, *quiet, *SERVED, *quiet]
    assert cause(again) == "context-exceeds-kv-pool"                     # it was started again, and serves
    assert cause([*FAILED, *quiet, *START]) == "context-exceeds-kv-pool"
    assert cause(again, code=-9) == "engine-exited" and cause([*FAILED, *quiet, *START], code=-9) == "unknown"
    other = [*FAILED, *quiet, *START,
             "(EngineCore pid=2) ERROR 11-30 10:00:30 [core.py:1510] ValueError: No available memory for the cache blocks. Try"]
    assert cause(other) == "kv-pool-too-small"


def test_an_old_error_of_a_serving_engine_is_not_its_end() -> None:
    lines = [*SERVED, OOM.format("10:01:00"), *[WORK.format(minute, 0) for minute in range(2, 30)]]
    assert cause(lines, code=-9) == "engine-exited"
    assert cause([*lines, OOM.format("10:29:30")], code=-9) == "out-of-memory"


def test_of_several_services_the_one_that_failed_is_told() -> None:
    lines = [f"gateway-1  | {line}" for line in SERVED] + [f"worker-1  | {line}" for line in FAILED] + [
        f"gateway-1  | {WORK.format(50, second)}" for second in range(50)]
    assert cause(lines) == "context-exceeds-kv-pool"


def test_services_without_end_are_taken_together() -> None:
    lines = [f"worker-1  | {START[0]}", *[f"service-{number}  | hello" for number in range(500)]]
    assert cause([*lines, *[f"worker-1  | {line}" for line in FAILED[1:]]]) == "context-exceeds-kv-pool"


def test_memory_is_bounded_whatever_the_length() -> None:
    def lines() -> Iterator[str]:
        yield from FAILED
        for number in range(40_000):
            yield f"(Worker_TP0 pid=3) INFO 11-30 10:00:31 [x.py:1] line {number} " + "x" * 200

    tracemalloc.start()
    assert cause(list(FAILED)) == "context-exceeds-kv-pool"
    assert explain(lines(), "vllm").diagnosis.cause == "context-exceeds-kv-pool"
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


@given(st.lists(st.binary(max_size=200), max_size=40))
def test_no_bytes_break_it(parts: list[bytes]) -> None:
    explain([part.decode(errors="replace") for part in parts], "sglang", 1)


# --- the command ------------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["explain", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_has_what_machines_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "engine.log"
    path.write_text("\n".join(FAILED))
    code, out, _ = run(capsys, str(path), "--json")
    found = json.loads(out)
    assert code == 0 and list(found) == ["cause", "summary", "evidence", "change", "restart_helps", "confidence", "numbers",
                                         "runbook", "engine"]
    assert (found["cause"], found["restart_helps"], found["confidence"]) == ("context-exceeds-kv-pool", False, "certain")
    assert found["change"].startswith("--max-model-len 3264") and found["evidence"] == [CONTEXT]
    assert found["numbers"]["largest_context_tokens"] == 3264 and found["engine"] == "vllm"


def test_text_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "engine.log"
    path.write_text("\n".join(FAILED))
    code, out, _ = run(capsys, str(path))
    assert code == 0 and out.startswith("context-exceeds-kv-pool (certain): ")
    assert "change   --max-model-len 3264" in out and "restart  does not help" in out and "lines look like it" in out


def test_standard_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "engine.log"
    path.write_text("\r\n".join(FAILED) + "\r\n")
    with path.open("rb") as file:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=file))
        code, out, _ = run(capsys, "-")
    assert code == 0 and "context-exceeds-kv-pool" in out


def test_garbage_between_the_lines_and_one_without_an_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise = random.Random(1).randbytes(200_000).replace(b"\n", b"")
    path = tmp_path / "engine.log"
    path.write_bytes(noise + b"\n" + "\n".join(FAILED).encode() + b"\n" + noise + b"\x1b]0;title\x07\x00")
    code, out, _ = run(capsys, str(path))
    assert code == 0 and out.startswith("context-exceeds-kv-pool")
    path.write_bytes(noise + b"\n\x1b]0;title\x07\x9b31m\n")
    code, out, _ = run(capsys, str(path), "--engine", "vllm", "--exit", "1")
    assert code == 0 and out.startswith("unknown") and not {"\x1b", "\x07", "\x9b", "\0"} & set(out)


@pytest.mark.parametrize(("name", "said"), [("none", "No such file"), (".", "Is a directory")])
def test_what_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str) -> None:
    code, out, err = run(capsys, str(tmp_path / name))
    assert code == 78 and out == "" and said in err and str(tmp_path / name) in err and err.count("\n") == 1


def test_a_log_of_nobody_asks_for_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "engine.log"
    path.write_text("hello\n")
    code, _, err = run(capsys, str(path))
    assert code == 78 and "--engine" in err and str(path) in err


@pytest.mark.parametrize("code", ["x", "256", "-65", "1.5", ""])
def test_an_exit_code_is_a_number(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", "-", f"--exit={code}"])
    assert ended.value.code == 2 and "0 to 255" in capsys.readouterr().err


def test_secrets_are_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "engine.log"
    path.write_text("vllm serve: error: unrecognized arguments: --api-kye sk-secret --tokn=sk-secret\n")
    _, out, _ = run(capsys, str(path), "--engine", "vllm", "--json")
    assert "sk-secret" not in out and json.loads(out)["cause"] == "arguments-invalid"


def test_its_help_teaches_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    out = capsys.readouterr().out
    assert "docker compose logs" in out and "--exit 137" in out


@pytest.mark.parametrize(("said", "shown"), [
    ("proxy http://bob:hunter2@proxy:3128 refused", "proxy http://***@proxy:3128 refused"),
    ("token hf_abcdefghijklmnopqrstuvwxyz is invalid", "token *** is invalid"),
    ("git@github.com:a/b and https://host/a@b:c", "git@github.com:a/b and https://host/a@b:c")])
def test_what_is_a_secret_in_itself_is_never_shown(said: str, shown: str) -> None:
    assert without_secrets(said) == shown
