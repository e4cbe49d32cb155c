"""HTTP of the supervisor: health, status, metrics, events, admission, and requests to workers.

Every error has OpenAI's shape and says that it is ours. Handlers read the Board and the Journal and change nothing; a
write becomes a `WorkerRequest` on the queue that the tick empties. GETs and /admission are open (they change nothing).
Writes need the bearer token. Without one they work on a loopback bind only, and there need a JSON body, the header
`X-Tightrank: 1` and a loopback Host: any web page can post to localhost, none can send those across origins.
"""
from __future__ import annotations

import hmac
import queue
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteHTTPException

from tightrank import __version__
from tightrank.admission import AdmissionRequest, admit, restart_seconds
from tightrank.config.units import is_loopback
from tightrank.edge import BodyLimit, EventStream, JsonResponse, error_response, validation_error
from tightrank.metrics import CONTENT_TYPE, render
from tightrank.nodes import Leader
from tightrank.nodes.words import Report
from tightrank.plan import run_directory
from tightrank.readers.pulse import pulse
from tightrank.records import Phase, Status, WorkerStatus
from tightrank.report import Board, Journal, plain, ready_json, status_json

STALE_SECONDS = 10.0           # a tick takes well under 1 s; one that is this old is not coming
BEAT_SECONDS = 5.0             # a comment this often keeps proxies and clients of a stream from giving up
MOST_TOKENS = 10**9
MOST_REQUESTS = 64             # waiting for the tick

Action = Literal["drain", "resume", "restart"]


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """What a person asks of one worker; carried out by the tick."""
    action: Action
    worker: str


class Requests(queue.Queue[WorkerRequest]):
    """What waits for the tick; `wake` ends its wait. Bounded."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        super().__init__(maxsize=MOST_REQUESTS)
        self._wake = wake

    def _put(self, item: WorkerRequest) -> None:
        super()._put(item)
        self._wake()


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """`public`: bound to more than loopback. `token`: who writes must send it; "" or None: see the module's text."""
    public: bool
    state_directory: Path
    token: str | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    leader: Leader | None = None       # where this is the leader of several hosts; `nodes_token` is what members must show
    nodes_token: str = field(default="", repr=False)
    member_of: str = ""                # on a member: where the leader is


class Admission(BaseModel):
    """The body of POST /admission; tokens."""
    model_config = ConfigDict(strict=True, extra="forbid")
    prompt_tokens: int = Field(ge=1, le=MOST_TOKENS)
    cached_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS)
    max_tokens: int = Field(default=1, ge=1, le=MOST_TOKENS)
    worker: str | None = Field(default=None, max_length=128)


class Nothing(BaseModel):
    """An empty JSON object."""
    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class _Parts:
    board: Board
    journal: Journal
    requests: Requests
    settings: ApiSettings

    def status(self) -> Status:
        if self.board.status is None:
            raise HTTPException(503, {"message": "the supervisor starts", "code": "not_ready"}, {"Retry-After": "1"})
        return self.board.status


def create(board: Board, journal: Journal, requests: Requests, settings: ApiSettings) -> FastAPI:
    """The application. `requests` receives what people ask of workers; see `Requests`."""
    app = FastAPI(title="tightrank", version=__version__, docs_url=None, redoc_url=None)
    parts = _Parts(board, journal, requests, settings)
    app.include_router(_health(parts))
    app.include_router(_reading(parts))
    app.include_router(_writing(parts))
    if settings.leader is not None:
        app.include_router(_nodes(settings.leader, settings.nodes_token))
    app.add_exception_handler(StarletteHTTPException, error_response)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(Exception, error_response)
    app.add_middleware(BodyLimit)
    return app


def _health(parts: _Parts) -> APIRouter:
    router = APIRouter()

    @router.get("/livez")
    def livez() -> Response:
        """200 while the supervisor's own loop turns."""
        alive = parts.board.fresh(STALE_SECONDS)
        return JsonResponse({"alive": alive}, 200 if alive else 503)

    @router.get("/startupz")
    def startupz() -> Response:
        """200 once every worker has been ready."""
        return JsonResponse({"started": parts.board.started}, 200 if parts.board.started else 503)

    @router.get("/readyz")
    @router.get("/health", include_in_schema=False)
    def readyz() -> Response:
        """200 when requests can be served; else 503 with what is not ready, why, and what to change."""
        status = parts.status()
        if not parts.board.fresh(STALE_SECONDS):
            stale = "the supervisor's loop has stopped"
            return JsonResponse({**ready_json(status), "ready": False, "reason": stale}, 503)
        return JsonResponse(ready_json(status), 200 if status.ready else 503, _retry_after(status))

    return router


def _retry_after(status: Status) -> dict[str, str]:
    now = time.time()
    waits = [seconds for w in status.workers if not w.ready and (seconds := restart_seconds(w, now)) is not None]
    return {} if status.ready or not waits else {"Retry-After": str(max(waits))}


def _reading(parts: _Parts) -> APIRouter:
    router = APIRouter()

    @router.get("/status")
    def status() -> Response:
        """Everything known about the deployment now."""
        return JsonResponse(status_json(parts.status()))

    @router.get("/plan")
    def plan() -> Response:
        """What was planned when the deployment came up."""
        return JsonResponse(dict(parts.settings.plan))

    @router.get("/metrics")
    def metric() -> Response:
        """Prometheus text."""
        text = render(parts.board.status, parts.journal.lost)
        return PlainTextResponse(text, media_type=CONTENT_TYPE)

    @router.get("/steps")
    def steps(worker: Annotated[str, Query(max_length=128)], since: Annotated[int, Query(ge=0)] = 0) -> Response:
        """The latest prefill steps of one worker, those with an `id` over `since`."""
        _known(parts, worker)
        return JsonResponse({"worker": worker, "steps": parts.board.steps(worker, since)})

    @router.get("/workers/{name}/pulse")
    def pulse_of(name: str) -> Response:
        """Whether a worker moves: read from its ranks' pages and processes now, whatever the supervisor's loop does."""
        found = _known(parts, name)
        return JsonResponse(plain(pulse(found, run_directory(parts.settings.state_directory, name, found.generation))))

    @router.get("/events")
    async def events(request: Request, since: Annotated[int, Query(ge=0)] = 0,
                     limit: Annotated[int, Query(ge=1, le=2048)] = 256,
                     beat: Annotated[float, Query(ge=0.25, le=60)] = BEAT_SECONDS) -> Response:
        """Events after `since`, oldest first; a live stream (SSE) when the client accepts text/event-stream, with a
        comment after each `beat` seconds of silence."""
        if "text/event-stream" in request.headers.get("accept", ""):
            last = request.headers.get("last-event-id", "")
            start = int(last) if re.fullmatch(r"[0-9]{1,18}", last) else since
            # A number that is still to come is of a journal that was removed since.
            return EventStream(parts.journal, start if start <= parts.journal.sequence else 0, beat)
        return JsonResponse({"events": parts.journal.since(since, limit), "last": parts.journal.sequence})

    @router.post("/admission")
    def admission(body: Admission) -> Response:
        """Whether a request of this size can be served now."""
        if body.cached_tokens >= body.prompt_tokens:
            raise HTTPException(400, {"message": f"cached_tokens={body.cached_tokens}: must be less than prompt_tokens="
                                      f"{body.prompt_tokens}", "param": "cached_tokens", "code": "invalid_value"})
        verdict = admit(parts.status(), AdmissionRequest(**body.model_dump()), time.time())
        if verdict.status == 200:
            return JsonResponse(verdict.body())
        raise HTTPException(verdict.status, {"message": verdict.message, "param": verdict.param, "code": verdict.code,
                                             "largest_prompt_tokens": verdict.largest_prompt_tokens,
                                             "cause": verdict.cause, "runbook": verdict.runbook},
                            {"Retry-After": str(verdict.retry_after_seconds)} if verdict.retry_after_seconds else None)

    return router


def _writing(parts: _Parts) -> APIRouter:
    router = APIRouter(dependencies=[Depends(_writer(parts.settings))])

    @router.post("/workers/{name}/{action}", status_code=202)
    def worker(name: str, action: str, body: Annotated[Nothing | None, Body()] = None) -> Response:
        """Asks the supervisor to drain, resume or restart a worker. 202: it is asked; /events tells what came of it."""
        phase = _known(parts, name).phase
        if action not in _SENTENCES:
            raise HTTPException(404, {"message": f"{action!r}: a worker can be asked to {', '.join(_SENTENCES)}",
                                      "code": "action_not_found"})
        if parts.settings.member_of:
            raise HTTPException(409, {"message": f"{name} is led from {parts.settings.member_of}: ask there for {action}",
                                      "code": "wrong_node"})
        if phase not in _PHASES[action]:
            raise HTTPException(409, {"message": f"{name} is {phase.value}: {action} can be asked of a worker that is "
                                                 f"{', '.join(sorted(_PHASES[action]))}", "code": "wrong_phase"})
        try:
            parts.requests.put_nowait(WorkerRequest(action, name))  # type: ignore[arg-type]
        except queue.Full:
            raise HTTPException(503, {"message": "too many requests wait for the supervisor's loop", "code": "busy"},
                                {"Retry-After": "1"})
        return JsonResponse({"accepted": True, "worker": name, "action": action,
                             "message": _SENTENCES[action].format(name)}, 202)

    return router


def _nodes(leader: Leader, token: str) -> APIRouter:
    def check(request: Request) -> None:
        if not _shows(request, token):
            raise HTTPException(401, {"message": "the token of nodes.token_file is needed", "code": "invalid_token"},
                                {"WWW-Authenticate": "Bearer"})

    router = APIRouter(dependencies=[Depends(check)])

    @router.post("/nodes")
    def nodes(request: Request, body: Report) -> Response:
        """For the supervisors of the worker's other hosts: how one is, and what it is to run."""
        if refused := leader.refusal(body):
            raise HTTPException(400, {"message": refused, "code": "wrong_node"})
        peer = (request.client.host, request.client.port) if request.client else None
        orders = leader.hear(body, time.monotonic(), peer)
        if orders is None:
            raise HTTPException(503, {"message": "the leader's loop has stopped", "code": "not_ready"})
        return JsonResponse(orders.model_dump())

    return router


_SENTENCES: Mapping[str, str] = {
    "drain": "{} finishes what it has and takes no more",
    "resume": "{} is to serve again",
    "restart": "{} is drained, ended and started as its next generation",
}


_PHASES: Mapping[str, frozenset[Phase]] = {
    "drain": frozenset({Phase.UP}),
    "resume": frozenset({Phase.DRAINING, Phase.BACKING_OFF, Phase.FAILED, Phase.STOPPED}),
    "restart": frozenset(set(Phase) - {Phase.STOPPING}),
}


def _known(parts: _Parts, name: str) -> WorkerStatus:
    workers = {worker.name: worker for worker in parts.status().workers}
    if name not in workers:
        raise HTTPException(404, {"message": f"worker={name!r}: not here (known: {', '.join(workers) or 'none'})",
                                  "param": "worker", "code": "worker_not_found"})
    return workers[name]


def _writer(settings: ApiSettings) -> Any:
    def check(request: Request) -> None:
        if settings.token:
            if not _shows(request, settings.token):
                raise HTTPException(401, {"message": "a bearer token is needed: Authorization: Bearer <token>",
                                          "code": "invalid_token"}, {"WWW-Authenticate": "Bearer"})
            return
        wrong = _public_wrong if settings.public else _loopback_wrong(request)
        if wrong:
            raise HTTPException(403, {"message": wrong, "code": "write_forbidden"})

    return check


def _shows(request: Request, token: str) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


_public_wrong = ("writes are off: this address is public and there is no token; set http.token_file or "
                 "TIGHTRANK_TOKEN, or bind http.host to 127.0.0.1")


# Read off the header itself: `request.url` takes our own address where it finds a Host odd (evil_name.example is).
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::[0-9]{1,5})?")


def _loopback_wrong(request: Request) -> str:
    host = _HOST.fullmatch(request.headers.get("host", ""))
    if host is None or not is_loopback(host[1]):
        return f"Host {request.headers.get('host', '')[:80]!r}: writes need a loopback name or address as Host"
    if request.headers.get("x-tightrank") != "1":
        return "writes need the header X-Tightrank: 1"
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return "writes need Content-Type: application/json"
    return ""
