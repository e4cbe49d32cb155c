"""The gateway's metrics as Prometheus text."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from tightrank.gateway.handle import Handler
from tightrank.gateway.peers import Peers
from tightrank.gateway.records import Standing

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Meter:
    """Counts answers. `first`: seconds until the first byte of good ones."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int, str]] = Counter()      # path, status, reason
        self.cut = 0
        self.gone = 0
        self._buckets = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def first(self, seconds: float) -> None:
        self._buckets[next((i for i, bound in enumerate(BOUNDS) if seconds <= bound), len(BOUNDS))] += 1
        self._sum += seconds

    def render(self, peers: Peers, handler: Handler, in_flight: int, ready: bool) -> str:
        members = list(peers.members.values())
        lines = [
            *_metric("ready", "gauge", "1 when a request can be served.", [({}, float(ready))]),
            *_metric("in_flight_requests", "gauge", "Requests at the gateway.", [({}, in_flight)]),
            *_metric("requests_total", "counter", "Requests that were answered.", [
                ({"path": path, "status": str(status), "reason": reason}, n)
                for (path, status, reason), n in sorted(self.answers.items())]),
            *_metric("streams_cut_total", "counter", "Streams that ended with an error event.", [({}, self.cut)]),
            *_metric("clients_gone_total", "counter", "Clients that left before their answer.", [({}, self.gone)]),
            *_metric("retries_total", "counter", "Second tries.", [({}, handler.retries)]),
            *_metric("leg_failures_total", "counter", "Legs that failed.",
                     [({"reason": kind.value}, n) for kind, n in handler.failures.items()]),
            *_metric("peer_standing", "gauge", "1 for the standing of a peer.", [
                ({"worker": m.peer.id, "role": m.peer.role, "standing": each.value}, float(m.standing is each))
                for m in members for each in Standing]),
            *_metric("peer_queued_tokens", "gauge", "Prompt tokens that wait at a peer.",
                     [({"worker": m.peer.id, "role": m.peer.role}, m.queued_tokens) for m in members]),
            *_metric("peer_running_requests", "gauge", "Requests at a peer.",
                     [({"worker": m.peer.id, "role": m.peer.role}, m.running) for m in members]),
            *self._histogram(),
        ]
        return "\n".join(lines) + "\n"

    def _histogram(self) -> Iterable[str]:
        name = "tightrank_gateway_first_byte_seconds"
        yield f"# HELP {name} Seconds from a request to the first byte of its answer."
        yield f"# TYPE {name} histogram"
        total = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self._buckets, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


def _metric(name: str, kind: str, words: str, values: Iterable[tuple[Mapping[str, str], float]]) -> Iterable[str]:
    yield f"# HELP tightrank_gateway_{name} {words}"
    yield f"# TYPE tightrank_gateway_{name} {kind}"
    for labels, value in values:
        text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        yield f"tightrank_gateway_{name}{{{text}}} {value}" if text else f"tightrank_gateway_{name} {value}"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
