"""tightrank.yaml, TIGHTRANK_* and --set -> Config; every refusal is one exact line."""
from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from tightrank.config import Config, Gateway, GatewayWorker, Loaded, load, load_gateway
from tightrank.config.keys import KEYS, TABLES, env_name, json_schema, overridable
from tightrank.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
GOOD = """\
model: models/tiny
engine: vllm
workers:
  - {name: a, port: 9001}
"""
STATIC = """\
gateway:
  workers:
    - {name: x, url: "http://10.0.0.4:8001", engine: vllm}
"""
Read = Callable[..., Loaded]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Loads text as ./tightrank.yaml of an empty folder."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str | bytes, environment: Mapping[str, str] | None = None, settings: Sequence[str] = ()) -> Loaded:
        path = Path("tightrank.yaml")
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load(path, environment or {}, settings)

    return load_text


def test_the_smallest_file(read: Read, tmp_path: Path) -> None:
    config = read(GOOD, {"XDG_STATE_HOME": "/x"}).config
    assert config.model == str(tmp_path / "models/tiny")
    assert config.command == ("vllm", "serve")
    assert config.hooks == ("ranks", "line")
    assert (config.line.budget, config.line.minimum, config.line.maximum) == (200_000_000, 256, None)
    assert (config.guard.floor_bytes, config.limits.drain_seconds) == (3 * 2**29, 30.0)
    assert [(worker.name, worker.port, worker.role) for worker in config.workers] == [("a", 9001, "both")]


@pytest.mark.parametrize(("text", "message"), [
    ("", "tightrank.yaml: model: is required: Directory of the model (with its config.json)."),
    ("model: m\nengine: vllm\n", "tightrank.yaml: workers: is required, for example workers: [{name: a, port: 8001}]"),
    ("- a\n", "tightrank.yaml:1: the file: must be a mapping of keys and values"),
    ("model: m\n\tengine: vllm\n",
     "tightrank.yaml:2: not valid YAML: found character '\\t' that cannot start any token"),
    ("model: [m\nengine: vllm\n", "tightrank.yaml:2: not valid YAML: expected ',' or ']', but got ':'"),
    ("model: m\n---\nengine: vllm\n", "tightrank.yaml:2: not valid YAML: but found another document"),
    ("model: *nothing\n", "tightrank.yaml:1: not valid YAML: found undefined alias 'nothing'"),
    (b"name: a\nmodel: \xff\n", "tightrank.yaml:2: byte 0xff is not UTF-8"),
    (b"name: a\nmodel: \x00\n", "tightrank.yaml:2: not valid YAML: special characters are not allowed"),
    (GOOD + "gaurd: {floor: 2GiB}\n", "tightrank.yaml:5: unknown key 'gaurd', did you mean 'guard'?"),
    (GOOD + "guard:\n  flor: 2GiB\n", "tightrank.yaml:6: unknown key 'guard.flor', did you mean 'guard.floor'?"),
    (GOOD + "limits: {zzz: 1}\n", "tightrank.yaml:5: unknown key 'limits.zzz', known are backoff_first, backoff_longest, "
     "drain, hang, hang_busy, hang_factor, restarts, start_stall"),
    (GOOD + "    prot: 1\n", "tightrank.yaml:5: not valid YAML: expected <block end>, but found '<block mapping start>'"),
    (GOOD.replace("port", "prot"), "tightrank.yaml:4: unknown key 'workers[].prot', did you mean 'workers[].port'?"),
    (GOOD + "engine: sglang\n",
     "tightrank.yaml:5: the file: the key 'engine' stands here twice, first at tightrank.yaml:2"),
    (GOOD.replace("vllm", "vlm"), "tightrank.yaml:2: engine: vlm must be one of vllm, sglang, atom"),
    (GOOD.replace("9001", "99999"), "tightrank.yaml:4: workers[0].port: 99999 must be between 1 and 65535"),
    (GOOD.replace("9001", "1:30"),
     "tightrank.yaml:4: workers[0].port: 1:30 must be a whole number, for example 2048, 200_000_000 or 2.0e8"),
    (GOOD.replace("9001", "0o10"),
     "tightrank.yaml:4: workers[0].port: 0o10 must be a whole number, for example 2048, 200_000_000 or 2.0e8"),
    (GOOD.replace(", port: 9001", ""). replace("name: a", "port: 1"),
     "tightrank.yaml:4: workers[0].name: is required: Name of the worker; unique."),
    (GOOD + "  - {name: a, port: 9002}\n",
     "tightrank.yaml:5: workers[1].name: a is the name of workers[0] too; names are unique"),
    (GOOD + "guard: {floor: 1.5}\n", "tightrank.yaml:5: guard.floor: 1.5 must be a number with one of the units B, KiB, MiB, "
     "GiB, TiB, KB, kB, MB, GB, TB, for example 1.5GiB"),
    (GOOD + "limits: {drain: 1:30}\n",
     "tightrank.yaml:5: limits.drain: 1:30 must be a number with one of the units ms, s, m, h, for example 10s"),
    (GOOD + "limits: {backoff_longest: 500ms}\n",
     "tightrank.yaml:5: limits.backoff_longest: 500ms is less than limits.backoff_first, 1s; raise it"),
    (GOOD + "line: {budget: 0}\n", "tightrank.yaml:5: line.budget: 0 must be between 1 and 1000000000000000; or it is auto"),
    (GOOD + "line: off\n", "tightrank.yaml:5: line: must be a mapping of keys and values; "
     "to switch the line off write hooks: [ranks]"),
    (GOOD + "guard:\n", "tightrank.yaml:5: guard: must be a mapping of keys and values"),
    (GOOD + "served_model:\n", "tightrank.yaml:5: served_model: has no value; write one or leave the key out"),
    (GOOD + "name: [a]\n", "tightrank.yaml:5: name: must be a single value, not a list or a mapping"),
    (GOOD + "name: Tiny\n", "tightrank.yaml:5: name: Tiny must be 1 to 40 of a-z, 0-9 and -, with a letter or digit at both "
     "ends"),
    (GOOD + "hooks: line\n", "tightrank.yaml:5: hooks: must be a list, for example [a, b]"),
    (GOOD + "hooks: [ranks, lines]\n", "tightrank.yaml:5: hooks: [ranks, lines] has 'lines', which must be one of "
     "ranks, line, indexer, headroom, empty-cache, heads"),
    (GOOD + "hooks: [line, line]\n", "tightrank.yaml:5: hooks: line, line: name each hook once"),
    (GOOD + "name: !!python/object/apply:os.system ['true']\n",
     "tightrank.yaml:5: name: must be a single value, not a list or a mapping"),
    (GOOD + "guard: &a {<<: *a}\n",
     "tightrank.yaml:1: not valid YAML: nested without end; take the anchor out of itself"),
    ("[" * 5000, "tightrank.yaml:1: not valid YAML: nested without end; take the anchor out of itself"),
    (GOOD + "name: !secret x\n", "tightrank.yaml:5: name: the tag !secret is not used here; leave it out"),
    (GOOD.replace("9001", "9001, devices: [0, 1, 2], tensor_parallel: 2"), "tightrank.yaml:4: workers[0].devices: 3 devices "
     "for 2 ranks (tensor_parallel 2 x pipeline_parallel 1); name 2"),
    (GOOD.replace("9001", "9001, env: {TIGHTRANK_RUN: x}"),
     "tightrank.yaml:4: workers[0].env: TIGHTRANK_RUN is set by the supervisor alone; leave it out"),
    (GOOD.replace("9001", "9001, env: {A-B: x}"),
     "tightrank.yaml:4: workers[0].env: has 'A-B', which must be a name of letters, digits and _"),
    (GOOD + "gateway: {prot: 1}\n", "tightrank.yaml:5: unknown key 'gateway.prot', did you mean 'gateway.port'?"),
    (GOOD + "gateway: {workers: {}}\n", "tightrank.yaml:5: gateway.workers: must be a list, each item with a name"),
    (GOOD + STATIC.replace("url", "uri"),
     "tightrank.yaml:7: unknown key 'gateway.workers[].uri', did you mean 'gateway.workers[].url'?"),
    (GOOD + STATIC.replace("engine: vllm", "engine: atom, role: decode"),
     "tightrank.yaml:7: gateway.workers[0].role: decode: the gateway cannot pair ATOM engines yet; leave it out"),
    (GOOD + STATIC.replace(", engine: vllm", ""), "tightrank.yaml:7: gateway.workers[0].engine: is required: What it is."),
    (GOOD + STATIC + STATIC.splitlines()[-1],
     "tightrank.yaml:8: gateway.workers[1].name: x stands there twice; names are unique"),
    (GOOD + "gateway: {supervisors: ['https://a:1']}\n",
     "tightrank.yaml:5: gateway.supervisors: [https://a:1] has 'https://a:1', "
     "which must be http://HOST:PORT, without a path, a query or credentials, for example http://10.0.0.2:9470"),
    (GOOD + "pd: {restart: both}\n", "tightrank.yaml:5: pd.restart: both must be one of one, pair"),
    (GOOD.replace("9001", "9001, args: {a: b}"), "tightrank.yaml:4: workers[0].args: must be a list, for example [a, b]"),
    (GOOD.replace("9001", "9001, args: [a, ]"[:-1] + "~]"),
     "tightrank.yaml:4: workers[0].args[1]: has no value; write one or leave the key out"),
])
def test_what_is_wrong_is_said_in_one_line(read: Read, text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert str(caught.value) == message
    assert caught.value.cause == "config-invalid"


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml: there is no such file; write one or name another with --config FILE$"):
        load(tmp_path / "none.yaml", {})


@pytest.mark.parametrize(("environment", "settings", "message"), [
    ({"TIGHTRANK_GAURD_FLOOR": "1GiB"}, [],
     "environment: unknown variable 'TIGHTRANK_GAURD_FLOOR', did you mean 'TIGHTRANK_GUARD_FLOOR'?"),
    ({"TIGHTRANK_GUARD_FLOOR": "lots"}, [], "env TIGHTRANK_GUARD_FLOOR: guard.floor: lots must be a number with one of the "
     "units B, KiB, MiB, GiB, TiB, KB, kB, MB, GB, TB, for example 1.5GiB"),
    ({}, ["guard.flor=1GiB"], "--set: unknown key 'guard.flor', did you mean 'guard.floor'?"),
    ({}, ["guard.floor"], "--set guard.floor: must be KEY=VALUE, for example --set guard.floor=2GiB"),
    ({}, ["http.port=0"], "--set http.port: http.port: 0 must be between 1 and 65535"),
])
def test_overrides_are_checked_alike(read: Read, environment: dict[str, str], settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(GOOD, environment, settings)
    assert str(caught.value) == message


def test_precedence_and_origin(read: Read) -> None:
    text, environment, settings = GOOD, {"TIGHTRANK_GUARD_FLOOR": "3GiB"}, ["guard.floor=4GiB"]
    seen = []
    for loaded in (read(text), read(text + "guard: {floor: 2GiB}\n"), read(text + "guard: {floor: 2GiB}\n", environment),
                   read(text + "guard: {floor: 2GiB}\n", environment, settings)):
        row = next(row for row in loaded.rows if row.key == "guard.floor")
        seen.append((loaded.config.guard.floor_bytes / 2**30, row.value, row.origin))
    assert seen == [(1.5, "1.5GiB", "default"), (2, "2GiB", "tightrank.yaml:5"),
                    (3, "3GiB", "env TIGHTRANK_GUARD_FLOOR"), (4, "4GiB", "--set guard.floor")]


def test_every_key_has_its_row(read: Read) -> None:
    rows = {row.key.replace("[0]", "[]") for row in read(GOOD + STATIC).rows}
    assert rows == set(KEYS)


def test_required_keys_may_come_from_the_environment(read: Read) -> None:
    config = read("workers: [{name: a}]", {"TIGHTRANK_MODEL": "m", "TIGHTRANK_ENGINE": "sglang"}).config
    assert config.command == ("python3", "-m", "sglang.launch_server")


def test_variables_that_are_no_settings_are_left_alone(read: Read) -> None:
    reserved = {"TIGHTRANK_RUN": "x", "TIGHTRANK_ADAPTER": "x", "TIGHTRANK_CACHE": "x", "TIGHTRANK_TOKEN": "x"}
    assert read(GOOD, reserved).config == read(GOOD).config


def test_names_of_variables_are_unique() -> None:
    assert len({env_name(path) for path in overridable()}) == len(overridable())


def test_scalars_are_text_as_written(read: Read) -> None:
    """YAML 1.1 would make False, 10, 90 and 1.0e+2 of them."""
    text = GOOD.replace("9001", "9001, args: [no, 1_0, '1:30', 1e2], env: {A: yes, B: 010, C: ''}").replace("a,", "n,")
    worker = read(text + "name: no\n").config.workers[0]
    assert worker.args == ("no", "1_0", "1:30", "1e2")
    assert worker.env == {"A": "yes", "B": "010", "C": ""}
    assert read(text + "name: no\n").config.name == "no"


@pytest.mark.parametrize("written", ["2.0e8", "2e8", "200000000", "200_000_000", "'2.0e8'"])
def test_a_budget_in_any_notation(read: Read, written: str) -> None:
    assert read(GOOD + f"line: {{budget: {written}}}\n").config.line.budget == 200_000_000


def test_anchors_and_merge_keys(read: Read) -> None:
    text = """\
model: m
engine: vllm
workers:
  - &base {name: a, port: 9001, args: [--x]}
  - {<<: *base, name: b, port: 9002}
"""
    first, second = read(text).config.workers
    assert (first.name, second.name, second.args, second.port) == ("a", "b", ("--x",), 9002)


def test_relative_paths_start_at_the_file(read: Read, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "t.yaml").write_text(GOOD + "state_directory: s\n")
    config = load(Path("conf/t.yaml"), {}, ["http.token_file=token"]).config
    read(GOOD)      # only to stand in tmp_path
    assert (config.model, config.state_directory) == (str(tmp_path / "conf/models/tiny"), str(tmp_path / "conf/s"))


def test_a_configuration_survives_being_stored(read: Read) -> None:
    config = read(GOOD.replace("9001", "9001, args: [--x], env: {A: b}, devices: [0]") + STATIC).config
    assert config.gateway.workers
    assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1, "name": "x"}', '{"schema": 1, "zzz": 1}'])
def test_a_stored_configuration_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="stored configuration"):
        Config.from_json(text)


def test_the_schema_names_every_key_and_the_example_keeps_it() -> None:
    schema = json_schema()
    for path in KEYS:
        place = schema
        for part in path.split("."):
            place = place["properties"][part.removesuffix("[]")]
            place = place["items"] if part.endswith("[]") else place
        assert place["description"]
    assert json.loads(json.dumps(schema)) == schema


def test_the_example_is_read_and_shows_every_key() -> None:
    path = ROOT / "docs" / "tightrank.example.yaml"
    load(path, {})
    text = path.read_text()
    missing = [key for key in KEYS if f"{key.rpartition('.')[2]}:" not in text]
    assert missing == []


@pytest.mark.parametrize(("text", "message"), [
    (GOOD + f"guard:\n  floor: {'9' * 400}B\n", "must be between 0B and 1024TiB"),
    (GOOD + f"line:\n  budget: {'9' * 400}e9\n", "must be between 1 and 1000000000000000"),
    (GOOD + f"line:\n  budget: {'9' * 5000}\n", "must be between 1 and 1000000000000000"),
    (GOOD + "guard:\n  floor: \u0661GiB\n", "must be a number with one of the units"),
    (GOOD.replace("models/tiny", "~nosuchuser/m"),
     "tightrank.yaml:1: model: ~nosuchuser/m starts in a home directory that is not known; write the path out"),
    (GOOD.replace("9001", "9001, tensor_parallel: 2, devices: [0, 0]"), "workers[0].devices: 0, 0: name each device once"),
    (GOOD.replace("9001", "9001, devices: [1], env: {CUDA_VISIBLE_DEVICES: 2}"), "workers[0].env: CUDA_VISIBLE_DEVICES has "
     "a key of its own, workers[0].devices, which is set too; leave one out"),
    (GOOD.replace("9001", "9001, api_key_file: k, env: {VLLM_API_KEY: s}"), "workers[0].env: VLLM_API_KEY has a key of its "
     "own, workers[0].api_key_file, which is set too; leave one out")])
def test_what_no_reader_can_use_is_refused_in_one_line(read: Read, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


# --- the gateway's part -----------------------------------------------------------------------------------------------

def test_a_gateway_needs_no_file() -> None:
    gateway = load_gateway(None, {}, [])
    assert gateway == Gateway(
        host="127.0.0.1", port=8000, supervisors=("http://127.0.0.1:9470",), engine_key_file=None, body_limit_bytes=32 << 20,
        in_flight=1024, silence_seconds=120.0, canary_seconds=30.0, drain_seconds=30.0, workers=(), engine_key=None)


def test_a_gateway_out_of_the_environment_and_settings() -> None:
    environment = {"TIGHTRANK_GATEWAY_SUPERVISORS": "http://a:1,http://[::1]:2/", "TIGHTRANK_LIMITS_DRAIN": "3s"}
    gateway = load_gateway(None, environment, ["gateway.port=80"])
    assert (gateway.supervisors, gateway.drain_seconds, gateway.port) == (("http://a:1", "http://[::1]:2"), 3.0, 80)


@pytest.mark.parametrize(("text", "supervisors"), [
    (GOOD, ("http://127.0.0.1:9470",)),
    (GOOD + "http: {host: 0.0.0.0, port: 9471}\n", ("http://127.0.0.1:9471",)),
    (GOOD + "http: {host: '::'}\n", ("http://[::1]:9470",)),
    (GOOD + STATIC, ("http://127.0.0.1:9470",)),                        # a deployment and an engine beside it
    (GOOD + STATIC + "  supervisors: []\n", ()),
    (STATIC, ()),                                                       # engines without any supervisor
    (STATIC + "  supervisors: ['http://h:1']\n", ("http://h:1",)),
    ("gateway: {supervisors: []}\n", ("http://127.0.0.1:9470",)),       # else it would know nobody
])
def test_whose_workers_a_gateway_serves(tmp_path: Path, text: str, supervisors: tuple[str, ...]) -> None:
    path = tmp_path / "tightrank.yaml"
    path.write_text(text)
    assert load_gateway(path, {}).supervisors == supervisors
    if text.startswith(GOOD):
        assert load(path, {}).config.gateway == load_gateway(path, {})


def test_engines_without_a_supervisor(tmp_path: Path) -> None:
    path = tmp_path / "tightrank.yaml"
    path.write_text(STATIC + '    - {name: y, url: "http://h:1/", engine: sglang, role: prefill, model: m, '
                             'transfer_port: 8999, context: 4096}\n')
    assert load_gateway(path, {}).workers == (
        GatewayWorker("x", "http://10.0.0.4:8001", "vllm", "both", "", 8998, None),
        GatewayWorker("y", "http://h:1", "sglang", "prefill", "m", 8999, 4096))


@pytest.mark.parametrize("url", ["", "h:1", "http://h", "http://h:0", "http://h:65536", "http://u:p@h:1", "http://h:1/v1",
                                 "http://h:1?a", "http://h:1#a", "HTTP://h:1", "http://:1", "http://h:1\n", "http://h :1",
                                 "http://[h]:1", "http://h:1//"])
def test_odd_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)^--set gateway.supervisors: gateway.supervisors: .* has '"):
        load_gateway(None, {}, [f"gateway.supervisors=http://h:1,{url}"])


def test_the_engines_key_is_read_and_never_shown(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    gateway = load_gateway(None, {}, [f"gateway.engine_key_file={key}"])
    assert gateway.engine_key == "sesame" and "sesame" not in repr(gateway)
    with pytest.raises(ConfigError, match=r"^--set gateway.engine_key_file: gateway.engine_key_file: .*none cannot be read"):
        load_gateway(None, {}, [f"gateway.engine_key_file={tmp_path / 'none'}"])


def test_lists_of_tables_come_from_the_file_alone() -> None:
    assert not [path for path in overridable() if path.rpartition(".")[0] in TABLES]
    with pytest.raises(ConfigError, match="unknown variable 'TIGHTRANK_GATEWAY_WORKERS'"):
        load_gateway(None, {"TIGHTRANK_GATEWAY_WORKERS": "x"})
