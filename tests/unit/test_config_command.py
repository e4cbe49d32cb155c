"""`tightrank run -- <engine command line>`: what is read off it, and that it stays as it was."""
from __future__ import annotations

from pathlib import Path

import pytest
from tightrank.config.command import from_command
from tightrank.errors import ConfigError


@pytest.mark.parametrize(("line", "engine", "model", "host", "port", "tensor_parallel"), [
    ("vllm serve /m", "vllm", "/m", "0.0.0.0", 8000, 1),
    ("/opt/v/bin/vllm serve /m --port 9000 --host ::1 -tp 2", "vllm", "/m", "::1", 9000, 2),
    ("vllm serve --model /m --tensor_parallel_size=4", "vllm", "/m", "0.0.0.0", 8000, 4),
    ("python -m vllm.entrypoints.openai.api_server --model=/m --port 1 --port 2", "vllm", "/m", "0.0.0.0", 2, 1),
    ("python3.11 -m vllm.entrypoints.cli.main serve /m", "vllm", "/m", "0.0.0.0", 8000, 1),
    ("python -m sglang.launch_server --model-path /m --tp 8", "sglang", "/m", "127.0.0.1", 30000, 8),
    ("env A=b numactl -N 0 python -u -m sglang.launch_server --model /m --tp-size=2 --port 1", "sglang", "/m", "127.0.0.1", 1,
     2),
    ("sglang serve --model-path /m --tensor-parallel-size 2", "sglang", "/m", "127.0.0.1", 30000, 2),
])
def test_known_command_lines(line: str, engine: str, model: str, host: str, port: int, tensor_parallel: int) -> None:
    config = from_command(line.split(), {}).config
    worker = config.workers[0]
    assert (config.engine, config.model, worker.host, worker.port, worker.tensor_parallel) == \
        (engine, model, host, port, tensor_parallel)
    assert config.command == tuple(line.split())
    assert config.as_written
    assert config.name == f"run-{port}"


def test_a_relative_model_starts_where_the_command_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_command(["vllm", "serve", "models/m"], {}).config.model == str(tmp_path / "models/m")


def test_the_role_is_read_off() -> None:
    argv = ["sglang", "serve", "--model-path", "/m", "--disaggregation-mode"]
    assert from_command([*argv, "prefill"], {}).config.workers[0].role == "prefill"
    assert from_command([*argv, "null"], {}).config.workers[0].role == "both"


def test_overrides_apply() -> None:
    loaded = from_command(["vllm", "serve", "/m"], {"TIGHTRANK_GUARD_FLOOR": "3GiB"}, ["hooks=ranks"])
    assert (loaded.config.guard.floor_bytes, loaded.config.hooks) == (3 * 2**30, ("ranks",))


def test_secrets_are_not_shown() -> None:
    loaded = from_command(["vllm", "serve", "/m", "--api-key", "first", "second", "--port", "9", "--hf_token=third"], {})
    assert not [row for row in loaded.rows if any(word in row.value for word in ("first", "second", "third"))]


@pytest.mark.parametrize(("argv", "message"), [
    ([], "command line: no engine found in 'nothing'"),
    (["bash", "-c", "vllm serve /m"], "command line: no engine found in 'bash -c vllm serve /m'"),
    (["ollama", "serve"], "command line: no engine found in 'ollama serve'"),
    (["vllm", "serve"], "command line: model: name the model's directory as the first word after `serve` or with --model"),
    (["vllm", "serve", "--port", "1"], "command line: model: name the model's directory as the first word"),
    (["sglang", "serve", "/m"], "command line: model: name the model's directory with --model-path"),
    (["vllm", "serve", "/m", "--port", "http"], "command line: workers[0].port: http must be a whole number"),
    (["vllm", "serve", "/m", "--port"], "command line: workers[0].port: '' must be a whole number"),
    (["vllm", "serve", "/m", "-tp", "0"], "command line: workers[0].tensor_parallel: 0 must be between 1 and 1024"),
])
def test_what_cannot_be_supervised_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_command(argv, {})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
