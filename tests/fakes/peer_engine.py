"""The fake P/D engine's inside: its processes, the turns of its loop, and the words of an answer."""
import asyncio
import json
import socket
import threading
from functools import partial

import engine
from peer_forms import Bad, word
from peer_pd import FAKE_BOOTSTRAP_HOST, GARBAGE, Blocks, Rooms, TransferFailed, digest
from peer_ranks import LoopRank

CHUNK_TOKENS = 2048
NO_ROOM = "Invalid request: Disaggregated request received without bootstrap room id."


class Machine(engine.Engine):
    """`running` maps a request's id to its task, `aborted` holds the ids of those that were ended on request."""

    def __init__(self, options, log):
        super().__init__(options)
        self.running, self.aborted, self.tasks = {}, set(), set()
        self.turning, self.prefilling = asyncio.Lock(), asyncio.Lock()
        self.rooms, self.blocks = Rooms(options, log), Blocks(options, log)

    def rank(self, telemetry, role, body, number):
        connection, followers = body
        led = role == "worker"
        return LoopRank(self.options, telemetry, connection, number, followers, led)

    def start(self):
        """The real engines' processes, when somebody looks at them."""
        if not self.telemetry.on:
            return
        self.spawn("resource_tracker", None, essential=False)
        vllm = self.options.engine == "vllm"
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(self.options.children)]
        for number, (_, theirs) in enumerate(pairs):
            name, role = ("VLLM::Worker", "worker") if vllm else ("sglang::scheduler", "scheduler")
            self.spawn(name, role, number, (theirs, ()))
        self.ranks = [ours for ours, _ in pairs]
        if vllm:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.spawn("VLLM::EngineCore", "engine-core", None, (theirs, self.ranks))
            self.ranks = [ours]
        else:
            self.spawn("sglang::detokenizer", "detokenizer")
        threading.Thread(target=self.watch, daemon=True).start()

    async def turn(self, **message):
        """One turn of the engine's loop in every rank. Never ends when one is stuck; OSError when one is gone."""
        if self.ranks:      # a request that is cancelled must not leave answers in the sockets
            await asyncio.shield(self.later(self.tell_ranks({"in_flight": self.in_flight, **message})))

    async def tell_ranks(self, message):
        loop = asyncio.get_running_loop()
        async with self.turning:
            for connection in self.ranks:
                await loop.sock_sendall(connection, json.dumps(message).encode())
            for connection in self.ranks:
                if not await loop.sock_recv(connection, 64):
                    raise OSError("a rank is gone")

    def later(self, coroutine):
        """Runs it beside the request that asks for it."""
        task = asyncio.ensure_future(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def prefill(self, tokens, fault):
        """The prompt's digest, after the time that it takes; prompts are taken one after the other."""
        rate = fault.get("tokens_per_second", self.options.prefill_tokens_per_second)
        async with self.prefilling:
            await asyncio.sleep(fault.get("seconds", 0) if fault.get("kind") == "slow-prefill" else 0)
            done = 0
            while done < len(tokens):
                new = self.chunk(done, min(len(tokens) - done, CHUNK_TOKENS))
                self.sequence += 1
                await self.turn(sequence=self.sequence, prefix=done, new=new, budget=self.budget, seconds=new / rate)
                await asyncio.sleep(0 if self.ranks else new / rate)
                done += new
        return digest(tokens)

    async def source(self, form, fault):
        """The digest: worked out here, or handed over by the peer."""
        body, prefill = form.body, partial(self.prefill, form.tokens, fault)
        if self.options.engine == "vllm":
            params = body.get("kv_transfer_params") or {}
            return await (self.take(fault, self.blocks.take, params) if params.get("do_remote_prefill") else prefill())
        if self.options.role == "both":
            return await prefill()
        room, host = body.get("bootstrap_room"), body.get("bootstrap_host")
        if type(room) is not int:
            raise Bad(NO_ROOM)
        if self.options.role == "prefill":
            return await (prefill() if host == FAKE_BOOTSTRAP_HOST else self.rooms.give(room, prefill))
        if host == FAKE_BOOTSTRAP_HOST:
            return GARBAGE
        return await self.take(fault, self.rooms.take, room, host, body.get("bootstrap_port") or self.options.transfer_port)

    @staticmethod
    async def take(fault, transfer, *arguments):
        if fault.get("kind") == "transfer-fails":
            await asyncio.sleep(fault.get("seconds", 0))
            raise TransferFailed("Internal server error")
        return await transfer(*arguments)

    async def words(self, form, fault):
        """The answer's words, each when it is there."""
        await self.turn()
        kv = await self.source(form, fault)
        count = 1 if self.options.role == "prefill" and self.options.engine == "sglang" else form.new_tokens
        for number in range(count):
            if fault.get("kind") == "abort" and number >= fault.get("after", 0):
                self.abort(form.request_id)
                await asyncio.sleep(0)
            if number:
                await asyncio.sleep(self.options.token_seconds)
                await self.turn()
            yield word(kv, number)

    def abort(self, request_id):
        """Ends this request (SGLang's /abort_request): whether it was there."""
        found = request_id in self.running
        if found:
            self.aborted.add(request_id)
            self.running[request_id].cancel()
        return found
