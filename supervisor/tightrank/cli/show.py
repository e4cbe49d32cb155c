"""/status as text for a person."""
from __future__ import annotations

import time
from typing import Any

Json = dict[str, Any]
_COLOURS = {"up": "32", "starting": "33", "draining": "33", "stopping": "33", "backing-off": "33", "failed": "31",
            "stopped": "2"}


def status_text(body: Json, colour: bool = False, now_unix: float | None = None) -> str:
    """What runs, in which phase, the memory of each rank against the floor, and causes with what to change."""
    now = time.time() if now_unix is None else now_unix
    memory, tightest = body["memory"], body["tightest_rank"]
    lines = [f"{body['name']}: {'ready' if body['ready'] else 'not ready: ' + body['reason']}",
             f"memory  {gib(memory['available_bytes'])} available of {gib(memory['mem_total_bytes'])}, "
             f"floor {gib(body['floor_bytes'])}, lowest seen {gib(body['guard'].get('lowest_available_bytes'))}"]
    if tightest:
        lines.append(f"tightest rank  {tightest['worker']} {tightest['role']} "
                     f"{'' if tightest['rank'] is None else tightest['rank']}: {gib(tightest['available_bytes'])} available")
    lines += [_level(level) for level in body.get("levels", ()) if level["in_force"]]
    for worker in body["workers"]:
        lines += ["", *_worker(worker, colour, now)]
    lines += [_node(node) for node in body.get("nodes", ())]
    return "\n".join(lines)


def _node(node: Json) -> str:
    """Another host of the worker."""
    known = node["available_bytes"] is not None
    memory = f", {gib(node['available_bytes'])} available, floor {gib(node['floor_bytes'])}" if known else ""
    budget = "" if node["budget"] is None else f", line {node['budget']:.3g} token²"
    reason = f": {node['reason']}" if node["reason"] else ""
    return f"  node {node['node']}  {node['address']}  {node['phase']}, generation {node['generation']}{memory}{budget}{reason}"


def _level(level: Json) -> str:
    return f"level {level['level']} is in force{' (dry run)' if level['mode'] == 'dry-run' else ''}  {level['sentence']}"


def gib(count: float | None) -> str:
    return "unknown" if count is None else f"{count / (1 << 30):.2f} GiB"


def _worker(worker: Json, colour: bool, now: float) -> list[str]:
    phase = f"\033[{_COLOURS[worker['phase']]}m{worker['phase']}\033[0m" if colour else worker["phase"]
    step = f" ({worker['step']})" if worker["step"] else ""
    lines = [f"{worker['name']}  {worker['engine']} {worker['engine_version'] or ''}  {phase}{step} for "
             f"{now - worker['since_unix']:.0f} s, generation {worker['generation']}, restarts {worker['restarts']}, "
             f"http://{worker['host']}:{worker['port']}"]
    if worker["line"]:
        line = worker["line"]
        lines.append(f"  line  {worker['line_budget']:.3g} token², chunks {line['minimum']} to {line['maximum']} by "
                     f"{line['granule']}, longest request {worker['context_tokens']} tokens, "
                     f"{worker['over_line_steps']} steps over the line")
    if worker.get("line_auto"):
        lines.append(f"  line  {worker['line_auto']['sentence']}")
    if worker.get("headroom"):
        lines.append(f"  headroom  {worker['headroom']['sentence']}")
    if worker.get("pace"):
        lines.append(f"  pace  {_pace(worker['pace'])}")
    lines += [f"  {_difference(row)}" for row in worker.get("comparisons", ()) if not row["agrees"]]
    lines += [_rank(rank) for rank in worker["ranks"]]
    if worker["diagnosis"]:
        lines += _cause(worker["diagnosis"])
        lines += [f"  bundle  {worker['bundle']}"] if worker.get("bundle") else []
    elif worker["reason"]:
        lines.append(f"  {worker['reason']}")
    return lines


def _pace(pace: Json) -> str:
    return (f"{pace['row_seconds'] * 1e6:.3g} us a token, {pace['pair_seconds'] * 1e9:.3g} ns a pair of token and key, "
            f"{pace['step_seconds'] * 1e3:.3g} ms a step (of {pace['samples']} steps, prompts up to {pace['longest_tokens']})")


def _difference(row: Json) -> str:
    whence = "by the plan" if row["source"] == "plan" else "at the last start"
    return f"differs  {row['term']}: {row['predicted']:,.6g} {whence}, {row['measured']:,.6g} now"


def _rank(rank: Json) -> str:
    hooks = " ".join(f"{name}={state['state']}" for name, state in rank["hooks"].items())
    number = "" if rank["rank"] is None else f" {rank['rank']}"
    return (f"  {rank['role'] + number:<16} pid {rank['id']['pid']:<8} {gib(rank['available_bytes'])} available  "
            f"{rank['steps']} steps  {hooks}").rstrip()


def _cause(diagnosis: Json) -> list[str]:
    return [f"  cause   {diagnosis['cause']} ({diagnosis['meaning']})", f"  reason  {diagnosis['summary']}",
            *(f"  said    {line}" for line in diagnosis["evidence"][:3]),
            f"  change  {diagnosis['change']}", f"  more    {diagnosis['runbook']}",
            f"  restart {'may help' if diagnosis['restart_helps'] else 'does not help'}"]
