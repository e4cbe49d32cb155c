"""The fake P/D engine's transfer of KV: SGLang's rooms, vLLM's blocks. The KV is the digest of the prompt, which the decode
side learns from the prefill side alone.

As in the real ones a decode side is slow to see that its peer is gone (SGLang: `notice_seconds`, and its whole patience
when the peer only stopped), and a prefill side does not see at all that its decode side went before the transfer.
"""
import asyncio
import hashlib
import secrets
import time

from peer_http import call

FAKE_BOOTSTRAP_HOST, GARBAGE = "2.2.2.2", "garbage!"
HANDSHAKE_SECONDS = 5.0          # vLLM's nixl/base_worker.py: RCVTIMEO of the handshake


class TransferFailed(Exception):
    """The client gets this as 500, in the engine's shape."""


def digest(tokens):
    return hashlib.sha256(repr(tokens).encode()).hexdigest()[:8]


class Room:
    def __init__(self):
        self.announced, self.kv = asyncio.Event(), asyncio.get_running_loop().create_future()
        self.prefilled = self.taken = self.waited_for = False


class Rooms:
    """SGLang, both sides."""

    def __init__(self, options, log):
        self.options, self.log, self.rooms, self.joined = options, log, {}, set()

    def at(self, room):
        return self.rooms.setdefault(room, Room())

    async def give(self, number, prefill):
        """The prefill side: waits for the decode side's word, computes, hands over. `prefill()` gives the digest."""
        room = self.at(number)
        if room.prefilled:
            raise TransferFailed(f"bootstrap_room {number} was used before")
        room.prefilled = True
        try:
            async with asyncio.timeout(self.options.patience):
                await room.announced.wait()
            kv = await prefill()
            if not room.waited_for:
                raise TransferFailed(f"Prefill transfer failed for request room={number}: decode instance could be dead")
        except TimeoutError:
            self.fail(room, "the decode side never came")
            raise TransferFailed(f"Prefill bootstrap failed for request room={number}: timed out after "
                                 f"{self.options.patience}s in KVPoll.Bootstrapping")
        except BaseException:
            self.fail(room, "the prefill side gave up")
            raise
        room.kv.set_result(kv)
        self.log("handed", room=number)
        return kv

    @staticmethod
    def fail(room, why):
        if not room.kv.done():
            room.kv.set_exception(TransferFailed(why))
            room.kv.exception()          # whether anybody waits for it or not

    async def announced(self, body):
        """A decode side's word on the transfer port: (status, answer), once the KV is there."""
        room = self.at(body["room"])
        if room.taken:
            return 409, {"error": f"room {body['room']} was used before"}
        room.taken = room.waited_for = True
        room.announced.set()
        self.log("announced", room=body["room"])
        try:
            return 200, {"kv": await asyncio.shield(room.kv), "from": self.options.name}
        except TransferFailed as error:
            return 500, {"error": str(error)}
        finally:
            room.waited_for = False

    async def take(self, number, host, port):
        """The decode side: the digest that the prefill side handed over."""
        if number in self.joined:
            raise TransferFailed(f"bootstrap_room {number} was used before")
        self.joined.add(number)
        try:
            async with asyncio.timeout(self.options.patience):
                answer = await self.ask(number, host, port)
        except TimeoutError:
            raise TransferFailed(f"Decode transfer failed for request room={number}: timed out after "
                                 f"{self.options.patience}s in KVPoll.WaitingForInput")
        self.log("received", room=number, source=answer["from"])
        return answer["kv"]

    async def ask(self, number, host, port):
        for _ in range(self.options.handshake_attempts):
            try:
                status, answer = await call(host, port, "/announce", {"room": number}, self.options.patience)
            except ConnectionRefusedError:
                await asyncio.sleep(1)
                continue
            except (OSError, EOFError):
                await asyncio.sleep(self.options.notice_seconds)
                raise TransferFailed(f"Lost connection with prefill instance (bootstrap_addr: {host}:{port})")
            if status != 200:
                raise TransferFailed(f"Decode transfer failed for request room={number}: {answer['error']}")
            return answer
        raise TransferFailed(f"Could not fetch prefill parallel info from {host}:{port} after "
                             f"{self.options.handshake_attempts} attempts")


class Blocks:
    """vLLM, both sides: what was prefilled for others waits here until it is fetched, once, or its lease ends."""

    def __init__(self, options, log):
        self.options, self.log, self.kept = options, log, {}

    def keep(self, request_id, kv, tokens):
        """The answer's kv_transfer_params."""
        name = f"{request_id}-{secrets.token_hex(4)}"
        ids = [1 + len(self.kept) + i for i in range(-(-tokens // 16))]
        self.kept[name] = kv, ids, time.monotonic() + self.options.lease
        return {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": ids,
                "remote_engine_id": self.options.engine_id, "remote_request_id": name, "remote_host": self.options.host,
                "remote_port": self.options.transfer_port, "tp_size": self.options.children}

    async def fetched(self, body):
        """A decode side's fetch on the transfer port: (status, answer)."""
        kv, ids, end = self.kept.pop(body["remote_request_id"], (None, None, 0.0))
        right = body["remote_engine_id"] == self.options.engine_id and ids == body["remote_block_ids"]
        if not right or time.monotonic() > end:
            return 404, {"error": "no such blocks"}
        self.log("handed", remote_request_id=body["remote_request_id"])
        return 200, {"kv": kv, "from": self.options.name}

    async def take(self, params):
        try:
            wanted = {name: params[name] for name in ("remote_request_id", "remote_engine_id", "remote_block_ids")}
            status, answer = await call(params["remote_host"], params["remote_port"], "/blocks", wanted, HANDSHAKE_SECONDS)
        except (OSError, EOFError, KeyError, TypeError):
            raise TransferFailed("Internal server error")
        if status != 200:
            raise TransferFailed("Internal server error")
        self.log("received", remote_request_id=params["remote_request_id"], source=answer["from"])
        return answer["kv"]
