"""Several hosts: what the leader makes of its members' reports, what a member makes of the leader's word and silence, and the
rules that follow. Time is given, nothing is sent."""
from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pydantic import ValidationError
from tightrank.config import Nodes
from tightrank.decide import Policy, decide
from tightrank.nodes.leader import GONE_SECONDS, START_SECONDS, Leader
from tightrank.nodes.member import Member, _Told
from tightrank.nodes.words import Orders, Refusal, Report, Trouble
from tightrank.numbering import Generations
from tightrank.records import ActionKind, Diagnosis, NodeOwn, NodesView, Phase, ProbeResult, Request, Shed
from views import GIB, reading, snapshot, view

LEASE, LEADER = 3.0, "the leader's supervisor"
NODES = Nodes(("a", "b", "c"), 0, 29500, "/t", LEASE)
ALIKE = {"configuration": "1234", "engine": "vllm 0.32.0"}
DIED = Diagnosis("killed-by-oom", "the kernel killed worker 1", ("Out of memory",), "give it less", True)
POLICY = Policy(GIB, GIB, 5, 1.0, 60.0, jitter=lambda: 0.0)


def own(phase: Phase = Phase.STARTING, generation: int = 4, **changes: Any) -> NodeOwn:
    return replace(NodeOwn("w0", phase, generation, False, False, True, None, 1000, None, 0, "", 8 * GIB, GIB), **changes)


def report(node: int, leader: str = "", generation: int = 0, phase: Phase = Phase.STOPPED, **changes: Any) -> Report:
    values = {"node": node, "supervisor": f"s{node}", "agreement": ALIKE, "leader": leader, "generation": generation,
              "phase": phase, "clean": phase in (Phase.STOPPED, Phase.BACKING_OFF), "ready": phase is Phase.STARTING,
              "stopping": False, "last": generation, "heard": 1, "heard_from": LEADER, "trouble": None,
              "available_bytes": 8 * GIB, "floor_bytes": GIB, "budget": 1000, "shed": None, "aborts": 0, "abort_why": ""}
    return Report(**{**values, **changes})


@pytest.fixture
def lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Leader:
    found = Leader(NODES, ALIKE, Generations(tmp_path / "g.json"), lambda: None)
    monkeypatch.setattr(found, "_me", LEADER)
    return found


def hear(leader: Leader, now: float, *reports: Report) -> Orders:
    """After a tick of the leader, whose phase stays."""
    before = leader._orders
    leader.publish(own(Phase.BACKING_OFF, 3) if before.generation is None else own(Phase.UP if before.admitted else
                                                                                 Phase.STARTING), now)
    for each in reports:
        orders = leader.hear(each, now)
    assert orders is not None
    return orders


def started(leader: Leader, now: float = 10.0) -> str:
    """Generation 4 has begun; the leader's name."""
    orders = hear(leader, now, report(1), report(2))
    leader.publish(own(), now)
    return orders.leader


# --- the leader -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("reports", "why"), [
    ([], "node 1 (b) has not reported yet"), ([report(1)], "node 2 (c) has not reported yet"),
    ([report(1), report(2, phase=Phase.STOPPING, generation=3)], "node 2 (c) is not clean yet (stopping, generation 3)"),
    ([report(1, agreement={**ALIKE, "engine": "vllm 0.33.0"}), report(2)],
     "node 1 (b) has another engine (vllm 0.33.0, here vllm 0.32.0)"),
    ([report(1, heard=0), report(2)], "node 1 (b) has not heard yet that nothing runs"),
    ([report(1, heard_from="x"), report(2)], "node 1 (b) has not heard yet that nothing runs"),
    ([report(1, stopping=True), report(2)], "node 1 (b) is stopping"), ([report(1), report(2)], "")])
def test_it_says_why_no_generation_can_start(lead: Leader, reports: list[Report], why: str) -> None:
    for each in reports:
        hear(lead, 10.0, each)
    assert lead.view(view(phase=Phase.BACKING_OFF), 10.5).blocked == why


def test_a_member_of_long_ago_blocks_too(lead: Leader) -> None:
    hear(lead, 10.0, report(1), report(2))
    assert lead.view(view(phase=Phase.BACKING_OFF), 10.0 + LEASE).blocked == ""
    assert lead.view(view(phase=Phase.BACKING_OFF), 14.0).blocked == "node 1 (b) was last heard of 4 s ago"


def test_a_generation_is_whole_when_all_have_its_ranks(lead: Leader) -> None:
    name = started(lead)
    assert not lead.view(view(phase=Phase.STARTING), 10.1).whole
    orders = hear(lead, 10.2, report(1, name, 4, Phase.STARTING), report(2, name, 4, Phase.STARTING, ready=False))
    assert (orders.generation, orders.admitted) == (4, False) and not lead.view(view(phase=Phase.STARTING), 10.2).whole
    hear(lead, 10.3, report(2, name, 4, Phase.STARTING))
    found = lead.view(view(phase=Phase.STARTING), 10.3)
    assert found.whole and found.trouble is None
    lead.publish(own(Phase.UP), 10.4)
    assert hear(lead, 10.4, report(1, name, 4, Phase.STARTING)).admitted


@pytest.mark.parametrize(("changes", "cause", "words"), [
    ({"phase": Phase.STOPPING, "trouble": Trouble.of(DIED)}, "killed-by-oom", "node 1 (b): the kernel killed worker 1"),
    ({"phase": Phase.STOPPED}, "node-lost", "node 1 (b) has ended its ranks"),
    ({"phase": Phase.UP, "supervisor": "another"}, "node-lost", "was restarted"),
    ({"phase": Phase.UP, "stopping": True}, "node-lost", "node 1 (b) is stopping"),
    ({"phase": Phase.STOPPED, "generation": 3}, "node-lost", f"has not started generation 4 after {START_SECONDS:.0f} s"),
    ({"phase": Phase.UP, "leader": "a leader before"}, "node-lost", "has not started generation 4")])
def test_what_ends_a_generation(lead: Leader, changes: dict[str, Any], cause: str, words: str) -> None:
    name, now = started(lead), 10.1 + START_SECONDS
    hear(lead, now, report(1, **{"leader": name, "generation": 4, **changes}), report(2, name, 4, Phase.UP))
    found = lead.view(view(phase=Phase.UP), now).trouble
    assert found is not None and found.cause == cause and words in found.summary and found.restart_helps


def test_silence_ends_it_and_what_was_said_before_goes_before_silence(lead: Leader) -> None:
    name = started(lead)
    hear(lead, 11.0, report(1, name, 4, Phase.UP), report(2, name, 4, Phase.UP))
    assert lead.view(view(phase=Phase.UP), 11.0 + LEASE).trouble is None
    found = lead.view(view(phase=Phase.UP), 14.1).trouble
    assert found is not None and found.cause == "node-lost" and "node 1 (b) was last heard of 3 s ago" in found.summary
    hear(lead, 12.0, report(2, name, 4, Phase.STOPPING, trouble=Trouble.of(DIED)))
    found = lead.view(view(phase=Phase.UP), 14.1).trouble
    assert found is not None and found.cause == "killed-by-oom"


def test_a_closed_connection_is_its_end_unless_another_is_made(lead: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    name = started(lead)
    for node in (1, 2):
        lead.hear(report(node, name, 4, Phase.UP), 11.0, ("10.0.0.9", 5000 + node))
    monkeypatch.setattr(time, "monotonic", lambda: 11.1)
    for peer in (None, ("10.0.0.9", 1), ("10.0.0.9", 5001)):
        lead.closed(peer)
    assert lead.view(view(phase=Phase.UP), 11.1 + GONE_SECONDS).trouble is None
    found = lead.view(view(phase=Phase.UP), 11.2 + GONE_SECONDS).trouble
    assert found is not None and "node 1 (b)" in found.summary and "closed the connection" in found.summary
    lead.hear(report(1, name, 4, Phase.UP), 11.3, ("10.0.0.9", 6001))
    lead.closed(("10.0.0.9", 5001))
    assert lead.view(view(phase=Phase.UP), 13.0).trouble is None


def test_what_it_recalled_itself_and_an_older_generation_are_no_troubles(lead: Leader) -> None:
    name = started(lead)
    recalled = Trouble.of(replace(DIED, cause="node-recalled"))
    hear(lead, 10.1, report(1, name, 4, Phase.STOPPING, trouble=recalled), report(2, name, 3, trouble=Trouble.of(DIED)))
    assert lead.view(view(phase=Phase.UP), 10.1).trouble is None
    assert lead.view(view(phase=Phase.STOPPING), 10.1).trouble is None


def test_nobody_is_told_anything_once_its_loop_stands(lead: Leader) -> None:
    started(lead)
    assert lead.hear(report(1), 10.0 + LEASE / 2) is not None
    assert lead.hear(report(1), 10.0 + LEASE) is None


def test_the_next_number_is_over_all_that_a_member_ever_took(lead: Leader) -> None:
    hear(lead, 1.0, report(1, last=57), report(2, last=3))
    assert lead.next_generation("w0") == 58


def test_the_tightest_host_is_named_and_one_that_is_silent_says_nothing(lead: Leader) -> None:
    name, shed = started(lead), Refusal.of(Shed(512, 30, "memory is short"))
    hear(lead, 11.0, report(1, name, 4, Phase.UP, budget=700, shed=shed), report(2, name, 4, Phase.UP, budget=900, aborts=2,
                                                                                 abort_why="the largest"))
    found = lead.view(view(phase=Phase.UP), 11.1)
    assert (found.budget, found.budget_from, found.aborts, found.abort_why) == (700, "node 1 (b)", 2, "node 2 (c): the largest")
    assert found.shed == Shed(512, 30, "node 1 (b): memory is short")
    hear(lead, 15.0, report(1, name, 4, Phase.UP, budget=700))
    assert lead.view(view(phase=Phase.UP), 15.0).budget is None


def test_reports_of_strangers_are_refused(lead: Leader) -> None:
    assert "members are 1 to 2" in lead.refusal(report(3))
    assert "install one release" in lead.refusal(report(1, schema_version=2))
    for wrong in ({"node": 0}, {"phase": "dancing"}, {"more": 1}, {"last": -1}):
        with pytest.raises(ValidationError):
            Report.model_validate({**json.loads(report(1).model_dump_json()), **wrong})


@given(st.text(max_size=64))
def test_a_cause_of_another_release_is_a_death(cause: str) -> None:
    assert Trouble.of(replace(DIED, cause=cause)).diagnosis("node 1").cause in ("rank-died", cause)


# --- a member ---------------------------------------------------------------------------------------------------------

@pytest.fixture
def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Member:
    monkeypatch.setattr(Member, "_ask_again", lambda self: None)
    return Member(replace(NODES, rank=1), 1, "t", ALIKE, Generations(tmp_path / "g.json"), lambda: None)


def tell(member: Member, now: float, generation: int | None = 4, leader: str = "l", **changes: Any) -> None:
    values = {"number": 2, "leader": leader, "generation": generation, "admitted": False, "why": "because", **changes}
    member._told = _Told(Orders(**values), now)


def test_it_runs_what_it_is_told_once(member: Member) -> None:
    idle = view(phase=Phase.STOPPED, generation=0)
    assert member.view(idle, 1.0).wanted is None
    tell(member, 1.0)
    assert member.view(idle, 1.0).wanted == 4 and member.next_generation("w0") == 4
    assert member.view(idle, 1.1).wanted is None
    with pytest.raises(OSError, match="generation 4 is not newer than 4"):
        member.next_generation("w0")


def test_a_number_that_was_used_is_not_run_again_for_anybody(member: Member) -> None:
    tell(member, 1.0, 57)
    member.view(view(phase=Phase.STOPPED, generation=0), 1.0)
    member.next_generation("w0")
    tell(member, 2.0, 12, "another leader")
    assert member.view(view(phase=Phase.STOPPED, generation=57), 2.0).wanted is None


@pytest.mark.parametrize(("changes", "cause"), [
    ({}, ""), ({"generation": None}, "node-recalled"), ({"generation": 5}, "node-recalled"),
    ({"leader": "x"}, "node-recalled")])
def test_its_ranks_end_with_the_leaders_word(member: Member, changes: dict[str, Any], cause: str) -> None:
    tell(member, 1.0)
    member.view(view(phase=Phase.STOPPED, generation=0), 1.0)
    member.next_generation("w0")
    tell(member, 2.0, **changes)
    found = member.view(view(phase=Phase.UP), 2.0).trouble
    assert (found.cause if found else "") == cause and (not found or "because" in found.summary)


def test_its_ranks_end_with_the_lease(member: Member) -> None:
    tell(member, 1.0)
    member.view(view(phase=Phase.STOPPED, generation=0), 1.0)
    member.next_generation("w0")
    member._refused = "ConnectError: no route"
    assert member.view(view(phase=Phase.UP), 1.0 + LEASE).trouble is None
    found = member.view(view(phase=Phase.UP), 4.2).trouble
    assert found is not None and found.cause == "node-lost" and "3.2 s ago" in found.summary and "no route" in found.summary


def test_its_ranks_end_when_nobody_listens_at_the_leader(member: Member) -> None:
    tell(member, 1.0)
    member.view(view(phase=Phase.STOPPED, generation=0), 1.0)
    member.next_generation("w0")
    member._no_door = 1.1
    assert member.view(view(phase=Phase.UP), 1.1 + GONE_SECONDS).trouble is None
    found = member.view(view(phase=Phase.UP), 1.2 + GONE_SECONDS).trouble
    assert found is not None and found.cause == "node-lost"


# --- the rules --------------------------------------------------------------------------------------------------------

def kinds(phase: Phase, nodes: NodesView, available: int = 20 * GIB, **changes: Any) -> list[ActionKind]:
    seen = snapshot({"w0": reading("w0", [])}, available)
    return [each.kind for each in decide(seen, [view(phase=phase, nodes=nodes, **changes)], POLICY)]


LEADS, FOLLOWS = NodesView(True), NodesView(False)
TROUBLE = Diagnosis("node-lost", "gone", (), "look", True)
SERVED = ProbeResult(1.0, True, True)


@pytest.mark.parametrize(("phase", "nodes", "changes", "wanted"), [
    (Phase.BACKING_OFF, LEADS, {"next_start_monotonic": 0.0}, [ActionKind.START]),
    (Phase.BACKING_OFF, replace(LEADS, blocked="node 1"), {"next_start_monotonic": 0.0}, []),
    (Phase.STOPPED, replace(LEADS, blocked="node 1"), {"requests": (Request.RESUME,)}, [ActionKind.BACK_OFF]),
    (Phase.STOPPING, replace(LEADS, blocked="node 1"), {"ended": True, "restart_wanted": True}, [ActionKind.BACK_OFF]),
    (Phase.STARTING, LEADS, {"probe": SERVED, "progress_monotonic": 99.0}, []),
    (Phase.STARTING, replace(LEADS, whole=True), {"probe": SERVED}, [ActionKind.ADMIT]),
    (Phase.UP, replace(LEADS, trouble=TROUBLE), {}, [ActionKind.STOP]),
    (Phase.UP, replace(FOLLOWS, trouble=TROUBLE), {}, [ActionKind.STOP]),
    (Phase.STOPPED, FOLLOWS, {"next_start_monotonic": 0.0, "requests": (Request.RESUME,)}, []),
    (Phase.BACKING_OFF, FOLLOWS, {"next_start_monotonic": 0.0}, []),
    (Phase.STOPPED, replace(FOLLOWS, wanted=5), {}, [ActionKind.START]),
    (Phase.STOPPED, replace(FOLLOWS, wanted=5), {"available": GIB}, []),
    (Phase.STARTING, replace(FOLLOWS, wanted=4), {"progress_monotonic": -10_000.0}, []),
    (Phase.STARTING, replace(FOLLOWS, wanted=4, admitted=True), {}, [ActionKind.ADMIT]),
    (Phase.STOPPING, FOLLOWS, {"ended": True, "diagnosis": DIED, "failures_in_row": 99}, [ActionKind.REST])])
def test_what_follows(phase: Phase, nodes: NodesView, changes: dict[str, Any], wanted: list[ActionKind]) -> None:
    assert kinds(phase, nodes, **changes) == wanted


# --- all together, with links that fail -------------------------------------------------------------------------------

class _Numbers(Generations):
    """Without a disk; it outlives its supervisor as the file does."""

    def __init__(self) -> None:
        self._numbers = {}

    def take(self, worker: str, number: int) -> int:
        if number <= self.last(worker):
            raise OSError("used")
        self._numbers[worker] = number
        return number


class _Quiet(Member):
    def _ask_again(self) -> None:
        pass


class _Host:
    """A supervisor as far as other hosts matter: it does what the rules of decide say."""

    def __init__(self, numbers: Generations, others: Leader | Member) -> None:
        self.numbers, self.others = numbers, others
        self.phase, self.generation = Phase.BACKING_OFF, 0

    def tick(self, now: float) -> None:
        found = self.others.view(view(phase=self.phase, generation=self.generation), now)
        if self.runs:
            if found.trouble is not None:
                self.phase = Phase.STOPPED
            elif self.phase is Phase.STARTING and (found.whole or found.admitted):
                self.phase = Phase.UP
        elif (not found.blocked) if found.leads else found.wanted is not None:
            self.generation, self.phase = self.others.next_generation("w0"), Phase.STARTING
        self.others.publish(own(self.phase, self.generation, ready=self.runs), now)

    @property
    def runs(self) -> bool:
        return self.phase in (Phase.STARTING, Phase.UP)


class Fenced(RuleBasedStateMachine):
    """Three hosts; links break, supervisors restart, hosts freeze, all at random."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.hosts = [self.made(node, _Numbers()) for node in range(3)]
        self.cut: set[int] = set()
        self.frozen: set[int] = set()
        self.highest = 0

    def made(self, node: int, numbers: Generations) -> _Host:
        if node == 0:
            return _Host(numbers, Leader(NODES, ALIKE, numbers, lambda: None))
        return _Host(numbers, _Quiet(replace(NODES, rank=node), 1, "t", ALIKE, numbers, lambda: None))

    def exchange(self, node: int) -> None:
        leader, member = self.hosts[0].others, self.hosts[node].others
        assert isinstance(leader, Leader) and isinstance(member, Member)
        if node in self.cut or {0, node} & self.frozen or member._report is None:
            return
        orders = leader.hear(member._report, self.now)
        if orders is not None:
            member._told = _Told(orders, self.now)

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0, 5.0]), order=st.permutations([0, 1, 2]))
    def passes(self, seconds: float, order: list[int]) -> None:
        self.now += seconds
        for node in order:
            if node not in self.frozen:
                self.hosts[node].tick(self.now)
            if node:
                self.exchange(node)
        for node in {1, 2} - self.frozen:
            told = self.hosts[node].others
            assert isinstance(told, Member)
            assert not self.hosts[node].runs or (told._told is not None and self.now - told._told.asked <= LEASE)

    @rule()
    def heals(self) -> None:
        """Everything works for a while: it must end up in one generation."""
        self.cut, self.frozen = set(), set()
        for _ in range(60):
            self.passes(0.25, [0, 1, 2])
        assert [host.phase for host in self.hosts] == [Phase.UP] * 3
        assert len({host.generation for host in self.hosts}) == 1

    @rule(node=st.sampled_from([1, 2]))
    def cuts_or_mends(self, node: int) -> None:
        self.cut ^= {node}

    @rule(node=st.sampled_from([0, 1, 2]))
    def freezes_or_thaws(self, node: int) -> None:
        self.frozen ^= {node}

    @rule(node=st.sampled_from([0, 1, 2]))
    def restarts(self, node: int) -> None:
        self.hosts[node] = self.made(node, self.hosts[node].numbers)
        self.frozen -= {node}

    @rule()
    def loses_its_disk_and_restarts(self) -> None:
        self.hosts[0] = self.made(0, _Numbers())

    @invariant()
    def ranks_of_two_generations_are_never_there_at_once(self) -> None:
        leader = self.hosts[0]
        for host in self.hosts[1:]:
            assert not (leader.runs and host.runs) or host.generation == leader.generation

    @invariant()
    def a_member_never_goes_back(self) -> None:
        for host in self.hosts[1:]:
            assert host.generation <= host.numbers.last("w0")


TestFenced = Fenced.TestCase
TestFenced.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
