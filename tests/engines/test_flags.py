"""The flags that the plan writes, read by the engines' own argument parsers."""
from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, run_command
from raw_engine import interpreter
from tightrank import engines, plan
from tightrank.config import Config
from tightrank.config.command import from_command
from tightrank.engines.base import Peering
from tightrank.host import HostFacts
from tightrank.inputs import Inputs

pytestmark = pytest.mark.engine
HOST = HostFacts(None, None)
_VLLM = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
print(json.dumps(vars(make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])), default=str))
"""
_SGLANG = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps(vars(parser.parse_args(sys.argv[1:])), default=str))
"""


def config(command: list[str], **worker: Any) -> Config:
    """A configuration as of a file: nothing is on the command line yet."""
    read = from_command(command, {}, ["guard.floor=0B", "served_model=tiny"]).config
    changed = dataclasses.replace(read.workers[0], args=(), host="127.0.0.1", port=9001, tensor_parallel=2,
                                  pipeline_parallel=2, **worker)
    return dataclasses.replace(read, workers=(changed,), as_written=False)


def parsed(engine: str, program: str, made: Config, words: int) -> dict[str, Any]:
    spec, = plan.build(made, HOST, Inputs({}, {"max_position_embeddings": 2**20}))
    env = {"PYTHONPATH": str(ROOT / "scripts" / "cpu" / "stubs"), "SGLANG_USE_CPU_ENGINE": "1"} if engine == "sglang" else {}
    done = run_command([interpreter(engine), "-c", program, *spec.argv[words:]], timeout=240, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_vllm_reads_them() -> None:
    made = dataclasses.replace(config(["vllm", "serve", "/m"], role="decode"), command=("vllm", "serve"))
    found = parsed("vllm", _VLLM, made, 2)
    wanted = {"model_tag": "/m", "host": "127.0.0.1", "port": 9001, "tensor_parallel_size": 2, "pipeline_parallel_size": 2,
              "served_model_name": ["tiny"], "max_num_batched_tokens": 2048, "enable_chunked_prefill": True,
              "max_model_len": 781250, "shutdown_timeout": 30}
    assert {name: found[name] for name in wanted} == wanted
    transfer = found["kv_transfer_config"]      # the engine's own record of it, as text
    assert "kv_connector='NixlConnector'" in transfer and "'kv_lease_duration': 30" in transfer


@pytest.mark.parametrize(("engine", "role"), [("vllm", "prefill"), ("sglang", "prefill"), ("sglang", "decode")])
def test_the_variables_are_read_by_the_engine(engine: str, role: str) -> None:
    """In its one table of variables."""
    told = engines.get(engine).peering(Peering(role, "127.0.0.1", 9000, None, 60.0))
    table = {"vllm": "vllm/envs.py", "sglang": "sglang/srt/environ.py"}[engine]
    more = {"sglang": "sglang/srt/utils/network.py"}.get(engine, table)
    packages = Path(interpreter(engine)).parent.parent.glob("lib/python3*/site-packages")
    texts = [(package / name).read_text() for package in packages for name in {table, more}]
    assert [each.name for each in told if not each.is_flag and not any(each.name in text for text in texts)] == []


def test_sglang_reads_them() -> None:
    made = dataclasses.replace(config(["sglang", "serve", "--model-path", "/m"], role="prefill"), command=("sglang", "serve"))
    found = parsed("sglang", _SGLANG, made, 2)
    wanted = {"model_path": "/m", "host": "127.0.0.1", "port": 9001, "tp_size": 2, "pp_size": 2, "served_model_name": "tiny",
              "chunked_prefill_size": 2048, "context_length": 781250, "disaggregation_mode": "prefill",
              "disaggregation_transfer_backend": "mooncake", "disaggregation_bootstrap_port": 8998}
    assert {name: found[name] for name in wanted} == wanted
