"""The exposition: the documented names only, unknown is absent, dead ranks are gone, labels are escaped."""
from __future__ import annotations

import re
from dataclasses import replace

from samples import LEVELS, failed, rank, status, worker
from tightrank.metrics import METRICS, render
from tightrank.records import NodeStatus, Phase

SAMPLE = re.compile(r'tightrank_(\w+?)(?:\{((?:\w+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (-?[\d.e+-]+)$')

AUTO = {"generation": 1, "budget": 10**8, "binds": True, "sentence": "auto", "tightest_rank": 1, "ranks": [
    {"rank": 1, "available_bytes": 8 << 30, "untouched_bytes": 1 << 30, "room_bytes": 5 << 30, "pairs": 10**9,
     "proven_pairs": 10**8, "pair_bytes": 1.5, "row_bytes": 2048.0, "short_row_bytes": 0.0, "step_bytes": 0.0, "samples": 20}]}


NODE = NodeStatus(1, "10.0.0.2", 0.2, "up", 3, 8 << 30, 1 << 30, 10**8, "")


def series(text: str) -> dict[str, float]:
    """All samples; each line must be a comment or a sample, and each sample must stand under its own TYPE."""
    found, under = {}, ""
    for row in text.splitlines():
        if row.startswith("# TYPE "):
            under = row.split()[2].removeprefix("tightrank_")
        elif not row.startswith("#"):
            match = SAMPLE.fullmatch(row)
            assert match and match[1] == under, row
            key = f"{match[1]}{{{match[2]}}}" if match[2] else match[1]
            assert key not in found
            found[key] = float(match[3])
    return found


def test_a_ready_deployment() -> None:
    found = series(render(status(), lost_events=3))
    assert found["up"] == 1 and found["journal_lost_events_total"] == 3
    assert found["host_available_bytes"] == 20 << 30 and found["guard_lowest_available_bytes"] == 19 << 30
    assert found['worker_phase{worker="w0",role="both",phase="up"}'] == 1
    assert sum(value for key, value in found.items() if key.startswith("worker_phase")) == 1
    assert len([key for key in found if key.startswith("worker_phase")]) == len(Phase)
    assert found['rank_available_bytes{worker="w0",rank="0",role="scheduler"}'] == 9 << 30
    assert found['prefill_tokens_total{worker="w0",rank="0",role="scheduler"}'] == 4096
    assert found['line_over_steps_total{worker="w0",role="both"}'] == 1
    assert not any(key.startswith("worker_failure") for key in found)


def test_every_metric_of_the_table_can_appear_and_nothing_else() -> None:
    full = status(worker(line_auto=AUTO), failed(name="w1"), levels=LEVELS, nodes=(NODE,))
    full = replace(full, memory=replace(full.memory, cgroup_limit_bytes=1 << 30))
    names = {key.partition("{")[0] for key in series(render(full))}
    assert names == {metric.name for metric in METRICS}
    assert all((metric.kind == "counter") == metric.name.endswith("_total") for metric in METRICS)


def test_a_host_that_is_not_heard_of_has_an_age_and_no_memory() -> None:
    late = replace(NODE, heard_seconds_ago=9.0, available_bytes=None, phase="unknown")
    found = [key for key in series(render(status(nodes=(late,)))) if key.startswith("node")]
    assert found == ['node_heard_seconds{node="1"}']


def test_an_auto_line_says_what_each_rank_allows() -> None:
    found = series(render(status(worker(line_auto=AUTO))))
    assert found['line_binds{worker="w0",role="both"}'] == 1
    assert found['line_pair_bytes{worker="w0",role="both",rank="1"}'] == 1.5
    assert found['line_room_bytes{worker="w0",role="both",rank="1"}'] == 5 << 30
    unknown = {**AUTO, "binds": None, "ranks": [{**AUTO["ranks"][0], "pair_bytes": None}]}
    assert not [key for key in series(render(status(worker(line_auto=unknown)))) if "line_binds" in key or "pair_bytes" in key]


def test_a_level_says_where_and_how() -> None:
    found = series(render(status(levels=LEVELS)))
    assert found['guard_level{action="shed",mode="dry-run",reason="host"}'] == 1
    assert found['guard_level_acts_total{action="shed",mode="dry-run",reason="host"}'] == 3
    assert found["guard_floor_in_seconds"] == 4.5


def test_unknown_is_absent_never_0() -> None:
    unknown = status(worker(ranks=(rank(available_bytes=None, beat_age_seconds=None),), line_budget=None, context_tokens=None,
                            processes=()), guard={})
    unknown = replace(unknown, memory=replace(unknown.memory, mem_available_bytes=None, pressure_some_avg10=None))
    found = {key.partition("{")[0] for key in series(render(unknown))}
    assert not found & {"rank_available_bytes", "rank_beat_age_seconds", "prefill_steps_total", "host_available_bytes",
                        "line_budget_tokens_squared", "worker_context_tokens", "worker_resident_bytes", "guard_stops_total",
                        "guard_sample_age_seconds", "cgroup_limit_bytes"}
    assert "worker_ready" in found


def test_dead_ranks_and_past_causes_are_gone() -> None:
    text = render(status(worker(ranks=(rank(), rank(rank=1, alive=False)))))
    assert 'rank="0"' in text and 'rank="1"' not in text
    assert 'worker_failure{worker="w0",role="both",reason="kv-pool-too-small"}' in series(render(status(failed())))


def test_hostile_names_stay_one_label() -> None:
    name = 'w"} 1\n\\'
    found = series(render(status(worker(name=name))))
    assert found['worker_ready{worker="w\\"} 1\\n\\\\",role="both"}'] == 1


def test_before_the_first_tick() -> None:
    assert set(series(render(None))) >= {"process_resident_bytes", "journal_lost_events_total"}
    assert "tightrank_up" not in render(None)


def test_a_process_without_a_loop_has_no_beat_that_grows_old() -> None:
    """The engine's HTTP process and the detokenizer say hello and never beat."""
    found = series(render(status(worker(ranks=(rank(), rank(role="detokenizer", rank=None, loops=1, beat_age_seconds=900.0))))))
    assert [key for key in found if key.startswith("rank_beat_age")] == [
        'rank_beat_age_seconds{worker="w0",rank="0",role="scheduler"}']
    assert 'rank_available_bytes{worker="w0",rank="",role="detokenizer"}' in found


def test_a_role_that_is_no_unicode_costs_no_scrape() -> None:
    assert 'role="a?"' in render(status(worker(ranks=(rank(role="a\udcff"),)))).encode().decode()
