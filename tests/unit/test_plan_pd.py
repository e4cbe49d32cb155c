"""Prefill and decode workers in the plan: ports, addresses, what their engines are told, what the user set already."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tightrank import plan
from tightrank.config import load
from tightrank.config.command import from_command
from tightrank.errors import ConfigError
from tightrank.host import HostFacts
from tightrank.inputs import Inputs
from tightrank.records import WorkerSpec

MODEL: dict[str, Any] = {"max_position_embeddings": 8192}
PAIR = [{"role": "prefill"}, {"role": "decode"}]


def build(tmp_path: Path, engine: str, workers: list[dict[str, Any]], environment: dict[str, str] | None = None,
          **sections: Any) -> tuple[WorkerSpec, ...]:
    named = [{"name": f"w{index}", "port": 9001 + index, **worker} for index, worker in enumerate(workers)]
    (tmp_path / "t.yaml").write_text(json.dumps({"model": "/m", "engine": engine, "workers": named, **sections}))
    return plan.build(load(tmp_path / "t.yaml", {}).config, HostFacts(None, None), Inputs(environment or {}, MODEL))


def refusal(tmp_path: Path, *arguments: Any, **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, *arguments, **sections)
    return str(caught.value).removeprefix(f"{tmp_path}/")


def flag(spec: WorkerSpec, name: str) -> str | None:
    return spec.argv[spec.argv.index(name) + 1] if name in spec.argv else None


def variables(spec: WorkerSpec, start: str) -> dict[str, str]:
    return {name.removeprefix(start): text for name, text in spec.env.items() if name.startswith(start)}


def test_a_pair_of_sglang(tmp_path: Path) -> None:
    prefill, decode = build(tmp_path, "sglang", PAIR, pd={"patience": "60500ms"})
    assert (prefill.transfer_host, prefill.transfer_port, decode.transfer_port) == ("127.0.0.1", 8998, None)
    assert prefill.listens() == (("127.0.0.1", 9001), ("127.0.0.1", 8998)) and decode.listens() == (("127.0.0.1", 9002),)
    assert [flag(spec, "--disaggregation-bootstrap-port") for spec in (prefill, decode)] == ["8998", None]
    assert [flag(spec, "--disaggregation-transfer-backend") for spec in (prefill, decode)] == ["mooncake"] * 2
    patience = {"BOOTSTRAP_TIMEOUT": "61", "WAITING_TIMEOUT": "61"}          # whole seconds, and not under what was asked for
    assert variables(prefill, "SGLANG_DISAGGREGATION_") == patience
    assert variables(decode, "SGLANG_DISAGGREGATION_") == {**patience, "HEARTBEAT_INTERVAL": "2", "HEARTBEAT_MAX_FAILURE": "2"}
    assert prefill.env["SGLANG_HOST_IP"] == decode.env["SGLANG_HOST_IP"] == "127.0.0.1"


def test_a_pair_of_vllm(tmp_path: Path) -> None:
    prefill, decode = build(tmp_path, "vllm", PAIR)
    for spec, kv_role in ((prefill, "kv_producer"), (decode, "kv_consumer")):
        assert json.loads(flag(spec, "--kv-transfer-config") or "") == {
            "kv_connector": "NixlConnector", "kv_role": kv_role, "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"kv_lease_duration": 30}}
    assert [variables(spec, "VLLM_NIXL_SIDE_CHANNEL_") for spec in (prefill, decode)] == [
        {"HOST": "127.0.0.1", "PORT": "5600"}, {"HOST": "127.0.0.1", "PORT": "5601"}]
    assert [spec.transfer_port for spec in (prefill, decode)] == [5600, 5601]


@pytest.mark.parametrize(("patience", "lease"), [("6s", 6), ("29.9s", 29), ("10m", 30)])
def test_the_lease_of_nixl_is_not_over_the_patience(tmp_path: Path, patience: str, lease: int) -> None:
    told = flag(build(tmp_path, "vllm", PAIR, pd={"patience": patience})[0], "--kv-transfer-config")
    assert told is not None and json.loads(told)["kv_connector_extra_config"] == {"kv_lease_duration": lease}


def test_a_patience_under_what_a_lease_can_be_is_refused(tmp_path: Path) -> None:
    assert "pd.patience: 5s must be between 6s and 24h" in refusal(tmp_path, "vllm", PAIR, pd={"patience": "5s"})


def test_several_of_each_have_ports_of_their_own(tmp_path: Path) -> None:
    workers = [{"role": "both"}, {"role": "decode"}, {"role": "prefill"}, {"role": "prefill", "transfer_port": 9100},
               {"role": "prefill"}]
    assert [spec.transfer_port for spec in build(tmp_path, "sglang", workers)] == [None, None, 8998, 9100, 9000]
    assert [spec.transfer_port for spec in build(tmp_path, "vllm", workers)] == [None, 5600, 5601, 9100, 5603]


def test_a_worker_of_both_is_told_nothing(tmp_path: Path) -> None:
    for engine in ("vllm", "sglang"):
        spec, = build(tmp_path, engine, [{}])
        assert (spec.address, spec.transfer_port, spec.transfer_host) == ("127.0.0.1", None, "")
        assert "transfer" not in " ".join(spec.argv) and not variables(spec, "SGLANG_DIS") | variables(spec, "VLLM_NIXL")


def test_addresses(tmp_path: Path) -> None:
    hosts = [{"host": "0.0.0.0"}, {"host": "::"}, {"host": "10.0.0.3"}, {"host": "0.0.0.0", "address": "gpu1"}]
    assert [spec.address for spec in build(tmp_path, "sglang", hosts)] == ["", "", "10.0.0.3", "gpu1"]
    named = build(tmp_path, "sglang", [{"role": "prefill", "host": "0.0.0.0", "address": "gpu1"}])[0]
    assert named.transfer_host == "0.0.0.0" and "SGLANG_HOST_IP" not in named.env          # it takes an address, no name
    nixl = build(tmp_path, "vllm", [{"role": "decode", "host": "127.0.0.1", "address": "10.0.0.3"}])[0]
    assert nixl.transfer_host == nixl.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.3"


def test_each_setting_has_its_note(tmp_path: Path) -> None:
    for engine in ("vllm", "sglang"):
        for spec in build(tmp_path, engine, PAIR):
            bare = build(tmp_path, engine, [{}])[0]
            names = {word for word in spec.argv if word.startswith("--")} - set(bare.argv) | \
                spec.env.keys() - bare.env.keys()
            noted = {note.partition(":")[0] for note in spec.notes if ":" in note}
            assert names - {"--disaggregation-mode"} <= noted, engine


@pytest.mark.parametrize(("engine", "args", "flag_name"), [
    ("vllm", ["--kv-transfer-config", "{}"], "--kv-transfer-config"),
    ("vllm", ["--kv-transfer-config.kv_role", "kv_both"], "--kv-transfer-config"),
    ("sglang", ["--disaggregation-transfer-backend", "nixl"], "--disaggregation-transfer-backend")])
def test_what_the_user_wrote_stays(tmp_path: Path, engine: str, args: list[str], flag_name: str) -> None:
    spec, = build(tmp_path, engine, [{"role": "prefill", "args": args}])
    assert sum(word.startswith(flag_name) for word in spec.argv) == 1


def test_variables_of_the_user_stay(tmp_path: Path) -> None:
    env = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "600"}
    for spec in (build(tmp_path, "sglang", [{"role": "decode", "env": env}])[0],
                 build(tmp_path, "sglang", [{"role": "decode"}], env)[0]):
        assert spec.env.get("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "600") == "600"      # launch lays it over the environment
        assert not [note for note in spec.notes if "WAITING_TIMEOUT" in note]


@pytest.mark.parametrize(("engine", "worker", "sections", "message"), [
    ("sglang", {"role": "prefill", "args": ["--disaggregation-bootstrap-port=1"]}, {},
     "t.yaml:1: workers[0].args: --disaggregation-bootstrap-port has a key of its own; use workers[0].transfer_port"),
    ("vllm", {"role": "prefill", "env": {"VLLM_NIXL_SIDE_CHANNEL_PORT": "1"}}, {},
     "t.yaml:1: workers[0].env: VLLM_NIXL_SIDE_CHANNEL_PORT has a key of its own; use workers[0].transfer_port"),
    ("vllm", {"role": "prefill", "env": {"VLLM_NIXL_SIDE_CHANNEL_HOST": "a"}}, {},
     "t.yaml:1: workers[0].env: VLLM_NIXL_SIDE_CHANNEL_HOST has a key of its own; use workers[0].address"),
    ("sglang", {"role": "decode", "args": ["--disaggregation-transfer-backend", "fake"]}, {"pd": {"transfer": "nixl"}},
     "t.yaml:1: workers[0].args: --disaggregation-transfer-backend has a key of its own; use pd.transfer"),
    ("vllm", {"role": "decode"}, {"pd": {"transfer": "mooncake"}}, "t.yaml:1: pd.transfer: mooncake: for vllm it is one of "
     "nixl; for another leave it out and write the engine's own flag in args"),
    ("sglang", {"role": "decode", "transfer_port": 9000}, {}, "t.yaml:1: workers[0].transfer_port: a sglang worker of role "
     "decode listens for no peers, prefill ones do; leave it out"),
    ("vllm", {"transfer_port": 9000}, {}, "t.yaml:1: workers[0].transfer_port: a vllm worker of role both listens for no "
     "peers, prefill and decode ones do; leave it out"),
    ("vllm", {"role": "prefill", "host": "0.0.0.0"}, {}, "default: workers[0].address: is required, since the engine tells it "
     "to its peers and host is 0.0.0.0: give the address of this host that they reach"),
    ("sglang", {"role": "prefill", "address": "10.0.0.3"}, {}, "default: workers[0].host: 127.0.0.1 cannot be reached at "
     "10.0.0.3 (workers[0].address), where its peers ask for KV; listen there or on 0.0.0.0")])
def test_what_cannot_work_is_said(tmp_path: Path, engine: str, worker: dict[str, Any], sections: dict[str, Any],
                                  message: str) -> None:
    assert refusal(tmp_path, engine, [worker], **sections) == message


@pytest.mark.parametrize(("words", "port"), [
    ("--disaggregation-mode prefill", 8998), ("--disaggregation-mode prefill --disaggregation-bootstrap-port 9100", 9100),
    ("--disaggregation-mode decode --disaggregation-bootstrap-port 9100", None), ("", None)])
def test_a_written_command_line_says_its_own_port(words: str, port: int | None) -> None:
    argv = f"sglang serve --model-path /m --port 9001 {words}".split()
    spec, = plan.build(from_command(argv, {}, ["guard.floor=0B"]).config, HostFacts(None, None), Inputs({}, MODEL))
    assert spec.transfer_port == port
    assert sum(word == "--disaggregation-bootstrap-port" for word in spec.argv) <= 1
