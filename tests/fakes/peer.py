"""A fake P/D engine: vLLM or SGLang as a gateway sees it, with their P/D protocols, faults at run time and a log.

    peer.py --engine vllm|sglang --role both|prefill|decode --port P --transfer-port B --control-port C [flags below]

It takes engine.py's flags too and accepts the real engine's. With TIGHTRANK_ADAPTER set it has the real processes, says
hello and beats (peer_ranks.py), so that it runs under `tightrank up`; else it is one process.
The text of an answer is the prompt's digest and numbered words (peer_forms.py), and on a decode side the digest is what the
prefill side handed over (peer_pd.py): a right text proves a real transfer. Prompts are counted in bytes.

The control port answers to: POST /fault {"kind": ..., ...} (peer_faults.py), POST /reset (all faults off, log empty),
GET /log (list of events with "at", CLOCK_MONOTONIC seconds, and "event": start, end, gone = the client closed first, abort,
announced, handed, received; a request's events share "number"), GET / (pids).
"""
import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
import time

import engine
from peer_engine import Machine
from peer_faults import Reply
from peer_http import Connection
from peer_paths import Paths


def parse(argv):
    env = os.environ.get
    p = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--name", default=f"peer-{os.getpid()}", help="what the log of its peer calls it")
    p.add_argument("--role", "--disaggregation-mode", dest="role", choices=("both", "null", "prefill", "decode"),
                   default="both")
    p.add_argument("--transfer-port", "--disaggregation-bootstrap-port", dest="transfer_port", type=int,
                   default=int(env("VLLM_NIXL_SIDE_CHANNEL_PORT", 0)), help="bootstrap port or side channel; 0: none")
    p.add_argument("--control-port", type=int, default=0, help="faults and log; 0: none")
    p.add_argument("--token-seconds", type=float, default=0.01)
    p.add_argument("--prefill-tokens-per-second", type=float, default=100_000)
    p.add_argument("--patience", type=float, default=float(env("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", 300)),
                   help="how long a side of SGLang waits for the other, seconds")
    p.add_argument("--notice-seconds", type=float, default=10, help="until SGLang's decode sees that its prefill died")
    p.add_argument("--handshake-attempts", type=int, default=15, help="of SGLang's decode, one a second")
    p.add_argument("--fault", type=json.loads, action="append", default=[], help="one that is on from the start: JSON")
    p.add_argument("--lease", type=float, default=30, help="how long vLLM keeps blocks for others, seconds")
    options = p.parse_known_args(argv, engine.parse(argv))[0]
    options.role = "both" if options.role == "null" else options.role
    options.engine_id = secrets.token_hex(8)
    return options


class Peer:
    """The ports: the engine's own, the transfer port, the control port."""

    def __init__(self, options):
        self.options, self.events, self.connections, self.server = options, [], set(), None
        self.machine = Machine(options, self.log)
        self.paths = Paths(self.machine, self.log)

    def log(self, event, **fields):
        self.events.append({"at": time.monotonic(), "event": event, **fields})

    async def control(self, request, connection):
        reply = Reply(connection, {})
        if request.method == "GET":
            facts = {"pid": os.getpid(), "children": sorted(self.machine.essential), "in_flight": self.machine.in_flight}
            return await reply.json(200, self.events if request.path == "/log" else facts)
        try:
            await {"/fault": self.add_fault, "/reset": self.reset}[request.path](request.json())
        except (KeyError, ValueError) as error:
            return await reply.json(400, {"error": str(error)})
        await reply.json(200, {})

    async def add_fault(self, fault):
        self.paths.faults.add(fault)
        if fault["kind"] == "refuse":
            await self.hang_up()
            if "seconds" in fault:
                asyncio.get_running_loop().call_later(fault["seconds"], lambda: self.machine.later(self.listen()))
        if fault["kind"] == "block":
            if not self.machine.ranks:
                raise ValueError("block: there are no rank processes without a supervisor")
            self.machine.later(self.machine.turn(block=True))

    async def reset(self, _):
        self.paths.faults.clear()
        self.events.clear()
        await self.listen()

    async def transfer(self, request, connection):
        reply = Reply(connection, {})
        path = {"/announce": self.machine.rooms.announced, "/blocks": self.machine.blocks.fetched}.get(request.path)
        await reply.json(*(await path(request.json()) if path else (200 if request.path == "/health" else 404, {})))

    async def listen(self):
        if self.server is None:
            self.server = await self.serve_at(self.options.port, self.paths.serve, self.options.host)

    async def hang_up(self):
        """No port, and no connection but those with a request in flight."""
        if self.server is not None:
            self.server.close()
            self.server = None
        for connection in [each for each in self.connections if each.serve == self.paths.serve and not each.busy]:
            connection.transport.abort()

    async def serve_at(self, port, serve, host="127.0.0.1"):
        loop = asyncio.get_running_loop()
        return await loop.create_server(lambda: Connection(serve, self.connections), host, port, backlog=1024)

    async def run(self):
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: engine.end(self.machine))
        for connection in self.machine.ranks:
            connection.setblocking(False)
        await asyncio.sleep(self.options.load_seconds)
        if self.options.control_port:
            await self.serve_at(self.options.control_port, self.control)
        if self.options.transfer_port:
            await self.serve_at(self.options.transfer_port, self.transfer, self.options.host)
        await self.machine.turn(ready=True)
        for fault in self.options.fault:
            await self.add_fault(fault)
        await self.listen()
        self.machine.ready = time.monotonic()
        engine.say(engine.READY_LINE[self.options.engine])
        await asyncio.Event().wait()


def main():
    peer = Peer(parse(sys.argv[1:]))
    peer.machine.start()                 # forks, so before there is a loop
    for text in engine.START_LINES[peer.options.engine]:
        engine.say(text.format(model="tiny"))
    if peer.options.die_with_line:
        time.sleep(peer.options.load_seconds)
        engine.say(peer.options.die_with_line)
        peer.machine.leave(peer.options.exit_code)
    asyncio.run(peer.run())


if __name__ == "__main__":
    main()
