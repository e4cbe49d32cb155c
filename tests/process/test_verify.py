"""`tightrank verify` against a whole deployment of the fake engine: ramps that pass, stop, die, go on."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment, Make
from fleet import GatewayProcess, Supervised, clean_env
from helpers import ROOT, free_ports, tightrank, wait_until
from memory import MemAvailable

MIB = 1 << 20
_MAIN = "import sys; from tightrank.cli import main; sys.exit(main())"
SLOW = ("--step-seconds", "0.1")           # 16k tokens under this line take some 15 s
LINE = {"line": {"budget": 2_000_000, "minimum": 64, "maximum": 1024, "context": 16384}}
OFF = {name: {"mode": "off"} for name in ("tighten", "shed", "abort")}
LOW = ("--floor", "1MiB")                  # whatever else this host does
NOBODY = f"http://127.0.0.1:{free_ports(1)[0]}"
Start = Callable[..., subprocess.Popen[str]]


def ramp(deployment: Deployment, *words: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
    return deployment.run("verify", "ramp", *words, timeout=timeout)


def report(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return found


def change(deployment: Deployment, **keys: Any) -> None:
    """Of its file."""
    deployment.file.write_text(json.dumps({**json.loads(deployment.file.read_text()), **keys}))


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a ramp that the test may meet in the middle; it ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(deployment: Deployment, *words: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-P", "-c", _MAIN, "verify", "ramp", *words, "-c", str(deployment.file)]
        started.append(subprocess.Popen(argv, env=clean_env(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def until_prefilling(deployment: Deployment, process: subprocess.Popen[str], steps: int = 8) -> None:
    """Until the engine is in the middle of a prompt, `steps` after its start."""
    before = deployment.worker()["ranks"]

    def there() -> bool:
        time.sleep(0.2)              # the supervisor has better things to do than to answer us
        assert process.poll() is None, process.communicate()
        ranks = deployment.worker()["ranks"]
        return any(rank["in_flight"] and rank["steps"] - first["steps"] >= steps
                   for rank, first in zip(ranks, before, strict=True))
    wait_until(there, 30, f"{steps} steps of a prompt")


def until_passed(directory: Path, count: int, process: subprocess.Popen[str]) -> None:
    def there() -> bool:
        time.sleep(0.1)
        assert process.poll() is None, process.communicate()
        return (directory / "report.json").exists() and len(report(directory)["sizes"]) == count
    wait_until(there, 40, f"{count} sizes in the report")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_ramp_that_passes(make: Make, tmp_path: Path, engine: str) -> None:
    deployment = make(engine=engine, settings={**LINE, "guard": {"floor": "64MiB", "margin": "64MiB", **OFF}}).up()
    deployment.wait_phase("up")
    out = tmp_path / "out"
    done = ramp(deployment, "--output", str(out), "--sizes", "2k,4k,8k")
    assert done.returncode == 0, done.stdout + done.stderr
    found = report(out)
    assert found["verdict"]["passed"] and found["floor_bytes"] == 128 * MIB and found["target"]["plan"]["argv"]
    for size, tokens in zip(found["sizes"], (2000, 4000, 8000), strict=True):
        assert (size["tokens"], size["outcome"], size["generation"]) == (tokens, "passed", 1)
        assert sum(chunk["tokens"] for chunk in size["chunks"]) == tokens and size["chunks"][0]["prefix"] == 0, "nothing cached"
        assert all(chunk["tokens"] * (chunk["prefix"] + chunk["tokens"]) <= 2_000_000 for chunk in size["chunks"])
        assert sum(band["tokens"] for band in size["bands"]) == tokens and size["tokens_per_second"] > 0
        assert {"host", "guard", "rank 0"} <= size["lowest_bytes"].keys() and len(size["memory"]) >= 2
    assert "passed: all 3 sizes up to 8k tokens passed" in done.stdout and "4k: passed" in done.stderr
    assert "| 8k | passed |" in (out / "report.md").read_text() and "<polyline" in (out / "rate.svg").read_text()
    again = ramp(deployment, "--output", str(out))
    assert again.returncode == 78 and "--resume" in again.stderr
    assert ramp(deployment, "--resume", str(out)).returncode == 0, "nothing is left to do"


def test_without_sizes_the_published_ones_are_scaled_to_the_longest_prompt(make: Make, tmp_path: Path) -> None:
    deployment = make(settings=LINE).up()
    deployment.wait_phase("up")
    done = ramp(deployment, "--output", str(tmp_path / "out"), *LOW, "--answer-tokens", "2")
    assert done.returncode == 0, done.stderr
    assert [size["tokens"] for size in report(tmp_path / "out")["sizes"]] == [2096, 4193, 6552, 8387, 13105, 16382]


def test_it_stops_at_the_first_level_that_fires(make: Make, tmp_path: Path, start: Start) -> None:
    """A hog eats 2 GiB while the prompt is computed; what was measured by then is in the report, and --resume goes on."""
    floor = MemAvailable().read(0) - 3000 * MIB
    tighten = {"mode": "act", "threshold": "2000MiB", "duration": "500ms", "pause": "1s", "hysteresis": "64MiB"}
    guard = {"floor": f"{floor}B", "margin": "64MiB", **OFF, "tighten": tighten}
    deployment = make(args=SLOW, settings={**LINE, "guard": guard}).up()
    deployment.wait_phase("up")
    out = tmp_path / "out"
    process = start(deployment, "--output", str(out), "--sizes", "1k,16k", *LOW)
    until_passed(out, 1, process)
    hog = [sys.executable, str(ROOT / "tests" / "fakes" / "hog.py"), "--bytes", str(2000 * MIB), "--bytes-per-second",
           str(500 * MIB), "--threads", "1", "--seconds", "40"]
    with subprocess.Popen(hog, stdout=subprocess.DEVNULL) as eating:
        try:
            output, errors = process.communicate(timeout=40)
        finally:
            eating.kill()
    assert process.returncode == 1, output + errors
    first, second = report(out)["sizes"]
    assert (first["outcome"], second["outcome"]) == ("passed", "guard-event") and "tighten fires: host" in second["why"]
    assert 0 < sum(chunk["tokens"] for chunk in second["chunks"]) < 16000, "as far as it came"
    assert second["lowest_bytes"]["host"] < first["lowest_bytes"]["host"]
    assert any("tighten fires" in sentence for sentence in second["events"])
    assert "guard-event: tighten fires" in output
    wait_until(lambda: not any(row["in_force"] for row in deployment.status()["levels"]), 30, "all has gone back")
    done = ramp(deployment, "--resume", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [size["outcome"] for size in report(out)["sizes"]] == ["passed", "passed"]
    assert report(out)["sizes"][0]["seed"] == first["seed"], "what has passed is not measured again"


def test_a_level_in_force_is_no_time_for_a_ramp(make: Make, tmp_path: Path) -> None:
    dry = {"mode": "dry-run", "threshold": "1000GiB", "duration": "500ms", "pause": "1s", "hysteresis": "64MiB"}
    deployment = make(settings={**LINE, "guard": {"floor": "64MiB", "margin": "64MiB", **OFF, "tighten": dry}}).up()
    deployment.wait_phase("up")
    wait_until(lambda: any(row["in_force"] for row in deployment.status()["levels"]), 10)
    steps = len(deployment.get("/steps?worker=w0").json()["steps"])
    done = ramp(deployment, "--output", str(tmp_path / "out"), "--sizes", "1k")
    assert done.returncode == 1 and "tighten is in force" in done.stdout, done.stderr
    assert len(deployment.get("/steps?worker=w0").json()["steps"]) == steps, "nothing was sent"


def test_one_that_is_killed_goes_on_where_it_was(make: Make, tmp_path: Path, start: Start) -> None:
    deployment = make(args=SLOW, settings=LINE).up()
    deployment.wait_phase("up")
    out = tmp_path / "out"
    process = start(deployment, "--output", str(out), "--sizes", "1k,2k,16k", *LOW)
    until_passed(out, 2, process)
    until_prefilling(deployment, process)
    busy = ramp(deployment, "--resume", str(out))
    assert busy.returncode == 78 and "another ramp writes there" in busy.stderr
    process.kill()
    process.wait()
    seeds = [size["seed"] for size in report(out)["sizes"]]
    both = ramp(deployment, "--resume", str(out), "--sizes", "1k")
    assert both.returncode == 78 and "--resume" in both.stderr
    done = ramp(deployment, "--resume", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = report(out)["sizes"]
    assert [size["tokens"] for size in found] == [1000, 2000, 16000] and [size["seed"] for size in found][:2] == seeds
    assert done.stderr.count("passed") == 1, "only the last was measured"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_what_it_has(make: Make, tmp_path: Path, start: Start, number: signal.Signals) -> None:
    deployment = make(args=SLOW, settings=LINE).up()
    deployment.wait_phase("up")
    out = tmp_path / "out"
    before = signal.signal(number, signal.default_int_handler)     # what runs us in the background may have had SIGINT ignored
    process = start(deployment, "--output", str(out), "--sizes", "16k", *LOW)
    signal.signal(number, before)
    until_prefilling(deployment, process)
    process.send_signal(number)
    errors = process.communicate(timeout=20)[1]
    assert process.returncode == 75 and f"--resume {out}" in errors and "Traceback" not in errors, errors
    [size] = report(out)["sizes"]
    assert size["outcome"] == "interrupted" and size["chunks"]


def test_an_engine_that_dies_ends_it_with_the_cause(make: Make, tmp_path: Path, start: Start) -> None:
    deployment = make(args=SLOW, settings={**LINE, "limits": {"backoff_first": "60s"}}).up()
    deployment.wait_phase("up")
    process = start(deployment, "--output", str(tmp_path / "out"), "--sizes", "16k", *LOW)
    until_prefilling(deployment, process)
    os.kill(deployment.pid("worker"), signal.SIGKILL)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 1, output + errors
    [size] = report(tmp_path / "out")["sizes"]
    assert size["outcome"] == "guard-event" and size["why"].startswith("rank-died"), size["why"]
    deployment.wait_phase("backing-off")
    again = ramp(deployment, "--resume", str(tmp_path / "out"))
    assert again.returncode == 69 and "w0 is backing-off" in again.stderr


def test_a_supervisor_that_goes_away_is_said_and_nothing_is_lost(make: Make, tmp_path: Path, start: Start) -> None:
    deployment = make(args=SLOW, settings=LINE).up()
    deployment.wait_phase("up")
    process = start(deployment, "--output", str(tmp_path / "out"), "--sizes", "1k,16k", *LOW)
    until_passed(tmp_path / "out", 1, process)
    until_prefilling(deployment, process)
    assert deployment.process is not None
    deployment.process.kill()
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 75 and "Traceback" not in errors, output + errors
    first, second = report(tmp_path / "out")["sizes"]
    assert first["outcome"] == "passed" and second["outcome"] == "lost" and "no supervisor answers" in second["why"]


def test_memory_under_the_floor_fails_the_first_size(make: Make, tmp_path: Path) -> None:
    deployment = make(settings=LINE).up()
    deployment.wait_phase("up")
    done = ramp(deployment, "--output", str(tmp_path / "out"), "--sizes", "1k,2k", "--floor", "1000GiB")
    assert done.returncode == 1 and "under-floor" in done.stdout and "1000GiB" in done.stdout, done.stdout + done.stderr
    assert [size["outcome"] for size in report(tmp_path / "out")["sizes"]] == ["under-floor"], "a longer prompt takes more"


def test_what_was_measured_is_printed_where_the_disk_takes_no_more(make: Make, tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands in for it: the first, empty report fits, 79 chunks do not."""
    deployment = make(settings=LINE).up()
    deployment.wait_phase("up")
    limited = ("import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
               "resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000)); " + _MAIN)
    argv = [sys.executable, "-P", "-c", limited, "verify", "ramp", "--output", str(tmp_path / "out"), "--sizes", "16k", *LOW,
            "-c", str(deployment.file)]
    done = subprocess.run(argv, env=clean_env(), text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 75 and "report.json: File too large" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout.splitlines()[0])["tokens"] == 16000
    assert report(tmp_path / "out")["sizes"] == [], "the one before is whole"


def test_another_configuration_is_another_ramp(make: Make, tmp_path: Path) -> None:
    deployment = make(settings=LINE).up()
    deployment.wait_phase("up")
    out = tmp_path / "out"
    assert ramp(deployment, "--output", str(out), "--sizes", "1k", *LOW).returncode == 0
    assert deployment.terminate() == 0
    change(deployment, line={**LINE["line"], "budget": 1_500_000})
    deployment.up().wait_phase("up")
    kept = (out / "report.json").read_bytes()
    done = ramp(deployment, "--resume", str(out))
    assert done.returncode == 78 and "budget was 2000000 and is 1500000" in done.stderr, done.stderr
    assert (out / "report.json").read_bytes() == kept


@pytest.mark.parametrize(("words", "code", "says"), [
    (("--sizes", "1k,20k"), 78, "--sizes: 20000 tokens are more than the longest prompt here, 16380; name sizes up to 16380"),
    (("--answer-tokens", "16384"), 78, "--answer-tokens: 16384 leave no room for a prompt; 16383 is the most"),
    (("--sizes", "2k,1k"), 2, "each size must be longer"), (("--floor", "2"), 2, "units"), (("--timeout", "0s"), 2, "between"),
    (("--worker", "w7"), 78, "those that do: w0"), (("--endpoint", "nonsense"), 2, "http://HOST:PORT"),
    (("--resume", "/nowhere"), 78, "--resume /nowhere: is no"), (("--output", "a", "--resume", "b"), 2, "not allowed with"),
    (("--output", "/proc/nothing"), 78, "/proc/nothing: No such file"), (("--api-key-file", "/nowhere"), 78, "--api-key-file"),
    (("--url", NOBODY), 69, "no supervisor answers"),
    (("--endpoint", NOBODY, "--sizes", "1k", "--output", "out"), 75, "lost: the connection to")])
def test_bad_input_is_one_clear_line(one: Deployment, tmp_path: Path, words: tuple[str, ...], code: int, says: str) -> None:
    done = tightrank("verify", "ramp", *words, "-c", str(one.file), cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert says in done.stderr + done.stdout, done.stdout + done.stderr
    assert code == 75 or not [path for path in tmp_path.iterdir() if path.name.startswith("verify-ramp")]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One deployment for all tests that do no harm to it; its engine asks for a key."""
    directory = tmp_path_factory.mktemp("verify")
    (directory / "key").write_text("sk-1\n")
    deployment = Deployment(directory, settings=LINE)
    [worker] = json.loads(deployment.file.read_text())["workers"]
    change(deployment, workers=[{**worker, "api_key_file": str(directory / "key")}])
    try:
        deployment.up().wait_phase("up")
        yield deployment
    finally:
        deployment.close()


def test_the_engines_key_is_sent_and_without_it_the_refusal_is_said(one: Deployment, tmp_path: Path) -> None:
    done = tightrank("verify", "ramp", "--sizes", "1k", *LOW, "-c", str(one.file), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sk-1" not in "".join(path.read_text() for path in next(tmp_path.glob("verify-ramp-w0-*")).iterdir())
    url = ("--url", f"http://127.0.0.1:{one.port}")
    alone = tightrank("verify", "ramp", *url, "--sizes", "1k", cwd=tmp_path)
    assert alone.returncode == 78 and "--floor" in alone.stderr, "without the file nobody knows it"
    keyless = tightrank("verify", "ramp", *url, "--sizes", "1k", *LOW, "--output", "keyless", cwd=tmp_path)
    assert keyless.returncode == 1 and "it answered 401: Unauthorized" in keyless.stdout, keyless.stderr
    keyed = tightrank("verify", "ramp", *url, "--sizes", "1k", *LOW, "--output", "keyed", "--api-key-file",
                      str(one.directory / "key"), cwd=tmp_path)
    assert keyed.returncode == 0, keyed.stderr


def test_a_ramp_through_the_gateway(make: Make, tmp_path: Path) -> None:
    deployment = make(settings=LINE).up()
    deployment.wait_phase("up")
    gateway = GatewayProcess(tmp_path, supervisors=[f"http://127.0.0.1:{deployment.port}"])
    try:
        gateway.start()
        done = ramp(deployment, "--endpoint", gateway.url, "--sizes", "1k,4k", *LOW, "--output", str(tmp_path / "out"))
        assert done.returncode == 0, done.stderr + gateway.output
        assert report(tmp_path / "out")["target"]["url"] == gateway.url
        assert sum(chunk["tokens"] for chunk in report(tmp_path / "out")["sizes"][1]["chunks"]) == 4000
    finally:
        gateway.close()


TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'


@pytest.mark.parametrize(("answer", "headers", "code", "says"), [
    (TOKEN + b"data: [DONE]\n\n", {}, 0, "passed"), (TOKEN.replace(b"\n", b"\r\n") + b"data: [DONE]\r\n\r\n", {}, 0, "passed"),
    ('data: {"choices": [{"text": "\u2028\x85"}]}\n\ndata: [DONE]\n\n'.encode(), {}, 0, "passed"),
    (TOKEN + b"data: [DONE]\n\n", {"X-Tightrank-Worker": "p0,w0@h:9470"}, 0, "passed"),
    (TOKEN + b"data: [DONE]\n\n", {"X-Tightrank-Worker": "w9"}, 1, "refused: the gateway sent it to w9, not to w0"),
    (TOKEN + b'data: {"error": {"message": "no KV"}}\n\n', {}, 1, 'the answer broke off: {"error": {"message": "no KV"'),
    (TOKEN + b"data: \xff\xfe{\n\n", {}, 1, "the answer broke off"), (b"data: []\n\n", {}, 1, "the answer broke off: []"),
    (TOKEN, {}, 1, "the answer broke off before its end"), (b"", {}, 1, "the answer broke off"),
    (b": beat\n\ndata: [DONE]\n\n", {}, 1, "without a token"),
    (TOKEN, {"Content-Length": "9999"}, 75, "lost: the connection to")])
def test_an_endpoint_that_answers_oddly(one: Deployment, tmp_path: Path, answer: bytes, headers: dict[str, str], code: int,
                                        says: str) -> None:
    class Odd(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        endpoint = ("--endpoint", f"http://127.0.0.1:{server.server_address[1]}", "-c", str(one.file))
        done = tightrank("verify", "ramp", "--sizes", "64", *LOW, "--output", "out", *endpoint, cwd=tmp_path)
    finally:
        server.shutdown()
        server.server_close()
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stdout + done.stderr
    assert says in done.stdout, done.stdout


def test_a_prefill_worker_is_reached_through_the_gateway_of_the_file(tmp_path: Path) -> None:
    """A pair of fakes that send no step records; what a client and the supervisor see of it is there."""
    pair = Supervised(tmp_path, "sglang", prefills=1, decodes=1)
    gateway = GatewayProcess(tmp_path, supervisors=[pair.url])
    change(pair.deployment, gateway={"port": gateway.port})
    try:
        pair.start()
        gateway.start()
        done = ramp(pair.deployment, "--sizes", "500,1k", *LOW, "--output", str(tmp_path / "out"))
        assert done.returncode == 0, done.stdout + done.stderr + gateway.output
        found = report(tmp_path / "out")
        assert found["target"]["role"] == "prefill" and found["target"]["url"] == f"http://127.0.0.1:{gateway.port}"
        assert all(size["first_token_seconds"] > 0 for size in found["sizes"])
    finally:
        gateway.close()
        pair.close()


def test_a_prompt_that_takes_too_long_fails(make: Make, tmp_path: Path) -> None:
    deployment = make(args=SLOW, settings=LINE).up()
    deployment.wait_phase("up")
    done = ramp(deployment, "--sizes", "16k", "--timeout", "1500ms", *LOW, "--output", str(tmp_path / "out"))
    assert done.returncode == 1 and "timeout: not answered within --timeout 1.5 s" in done.stdout, done.stdout + done.stderr


def test_two_ramps_are_compared(make: Make, tmp_path: Path) -> None:
    deployment = make(args=("--step-seconds", "0.02"), settings=LINE).up()
    deployment.wait_phase("up")
    for name, sizes in (("a", "2k,8k"), ("b", "1k,2k,8k")):
        assert ramp(deployment, "--sizes", sizes, *LOW, "--output", str(tmp_path / name)).returncode == 0
    done = tightrank("verify", "compare", str(tmp_path / "a"), str(tmp_path / "b" / "report.json"), "--tolerance", "0.9")
    assert done.returncode == 0 and "B is " in done.stdout and "4,096 - 8,192" in done.stdout, done.stdout + done.stderr
    assert "in one of them only: 1k" in done.stdout
    body = report(tmp_path / "b")
    body["sizes"][2]["first_token_seconds"] *= 20
    (tmp_path / "b" / "report.json").write_text(json.dumps(body))
    slower = tightrank("verify", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--tolerance", "0.9", "--json")
    assert slower.returncode == 1 and json.loads(slower.stdout)["verdict"] == "worse"
    (tmp_path / "b" / "report.json").write_text("{")
    for words, code in ((("a", "b"), 78), (("a", "nowhere"), 78), (("a", "b", "--tolerance", "2"), 2)):
        bad = tightrank("verify", "compare", *words, cwd=tmp_path)
        assert bad.returncode == code and "Traceback" not in bad.stderr, bad.stderr


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_answers_are_recorded_and_compared_after_a_restart_without_the_adapter(make: Make, tmp_path: Path, engine: str) -> None:
    deployment = make(engine=engine, settings=LINE).up()
    deployment.wait_phase("up")
    record = tmp_path / "with.json"

    def parity(*words: str) -> subprocess.CompletedProcess[str]:
        return deployment.run("verify", "parity", *words)

    done = parity("--record", str(record), "--sizes", "64,3k", "--answer-tokens", "5")
    assert done.returncode == 0 and "4 answers of" in done.stdout, done.stderr
    taken = parity("--record", str(record))
    assert taken.returncode == 78 and "name another file" in taken.stderr
    assert deployment.terminate() == 0
    change(deployment, hooks=[])
    deployment.up().wait_phase("up")
    assert not deployment.worker()["ranks"], "nothing of ours is in it"
    blind = ramp(deployment, "--sizes", "1k", *LOW, "--output", str(tmp_path / "blind"))
    assert blind.returncode == 0 and report(tmp_path / "blind")["sizes"][0]["chunks"] == [], blind.stderr
    assert "| no records |" in (tmp_path / "blind" / "report.md").read_text()
    done = parity("--against", str(record))
    assert done.returncode == 0 and "4 of 4 answers are equal" in done.stdout, done.stdout + done.stderr
    url = f"http://127.0.0.1:{deployment.engine_port}"
    both = parity("--with", url, "--without", url, "--sizes", "64", "--json")
    assert both.returncode == 0 and json.loads(both.stdout)["alike"], both.stderr
    told = json.loads(record.read_text())
    told["answers"][1]["tokens"][3] += 1
    record.write_text(json.dumps(told))
    different = parity("--against", str(record))
    assert different.returncode == 1 and "3 of 4 answers are equal, 0 part at a near tie, 1 differ" in different.stdout
    assert "token 3" in different.stdout


@pytest.mark.parametrize(("words", "code", "says"), [
    (("--record", "a", "--against", "b"), 2, "not allowed with"), ((), 2, "required"), (("--with", NOBODY), 78, "give both"),
    (("--with", NOBODY, "--without", NOBODY), 69, "nobody answers"), (("--against", "nowhere"), 78, "cannot be read"),
    (("--against", "tightrank.yaml"), 78, "is no report of"),
    (("--against", "x", "--sizes", "64"), 78, "leave the options out"),
    (("--record", "new", "--sizes", "20k"), 1, "it answered 400: This model's maximum context length"),
    (("--record", "/proc/new", "--sizes", "64"), 75, "/proc/new: ")])
def test_bad_input_of_parity_is_one_clear_line(one: Deployment, words: tuple[str, ...], code: int, says: str) -> None:
    done = tightrank("verify", "parity", *words, "-c", str(one.file), cwd=one.directory)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert says in done.stderr, done.stdout + done.stderr
