"""The fake P/D engine's paths: what vLLM and SGLang answer, how they refuse, how they fail."""
import asyncio
import base64
import hashlib
import itertools
import secrets
import struct
from functools import partial

from peer_faults import Answered, Faults
from peer_forms import FORMS, Bad, tokens_of
from peer_pd import TransferFailed, digest

KEPT_BODY_BYTES = 1 << 16        # of a request's body in the log; its digest is always of the whole


class Paths:
    """`log(event, **fields)` gets a start, then an end or gone, for each request."""

    def __init__(self, machine, log):
        self.machine, self.options, self.log = machine, machine.options, log
        self.numbers, self.faults = itertools.count(1), Faults()

    async def serve(self, request, connection):
        number, reply = next(self.numbers), self.faults.reply(request.path, connection)
        log = partial(self.log, number=number, path=request.path)
        self.log_start(log, request, reply.fault)
        try:
            await reply.before()
            await self.route(request, reply, log)
        except Answered:
            pass
        except Bad as error:
            await self.refuse(reply, 400, str(error))
        except OSError:             # a rank died under the request
            await self.refuse(reply, 500, "EngineCore encountered an issue.", "InternalServerError")
        except asyncio.CancelledError:
            log("gone")
            raise
        log("end", status=reply.status)

    async def route(self, request, reply, log):
        options = self.options
        if request.method == "GET":
            return await self.get(request.path, reply)
        if options.api_key and request.headers.get("authorization") != f"Bearer {options.api_key}":
            return await self.refuse(reply, 401, "Unauthorized", "AuthenticationError")
        try:
            body = request.json()
        except ValueError as error:
            raise Bad(f"the body is no JSON object: {error}")
        if request.path in FORMS and (options.engine == "sglang" or request.path != "/generate"):
            return await self.generate_at(request, body, reply)
        path = {"/v1/embeddings": self.embed, "/tokenize": self.tokenize, "/detokenize": self.detokenize,
                "/abort_request": partial(self.abort, log), "/set_internal_state": self.set_budget}.get(request.path)
        await (path(body, reply) if path else self.refuse(reply, 404, "Not Found", "NotFoundError"))

    def log_start(self, log, request, fault):
        try:
            body = request.json() if request.body else {}
        except ValueError:
            body = {}
        log("start", method=request.method, target=request.target, connection=request.connection, headers=request.headers,
            generation=request.headers.get("x-tightrank-generation"), request_id=request.headers.get("x-request-id"),
            rid=body.get("rid"), room=body.get("bootstrap_room"), bytes=len(request.body), fault=fault.get("kind"),
            sha256=hashlib.sha256(request.body).hexdigest(), body=request.body[:KEPT_BODY_BYTES].decode("latin-1"))

    async def generate_at(self, request, body, reply):
        options, form = self.options, FORMS[request.path]
        vllm, name = options.engine == "vllm", body.get("model", options.served_model_name)
        if vllm and name != options.served_model_name:
            return await self.refuse(reply, 404, f"The model `{name}` does not exist.", "NotFoundError")
        given = request.headers.get("x-request-id") if vllm else body.get(form.rid)
        request_id = given or secrets.token_hex(8)
        form = form(body, f"{form.kind}-{request_id}" if vllm else request_id, name, vllm or request.path == "/generate")
        if len(form.tokens) + form.new_tokens > options.context:
            raise Bad(f"This model's maximum context length is {options.context} tokens. However, you requested "
                      f"{form.new_tokens} output tokens and your prompt contains {len(form.tokens)} input tokens.")
        await self.generate(form, reply)

    async def generate(self, form, reply):
        machine, words, task = self.machine, [], asyncio.current_task()
        machine.running[form.request_id] = task
        machine.in_flight += 1
        try:
            if form.stream and form.head_first:
                await reply.begin()
            async for each in machine.words(form, reply.fault):
                if form.stream and not words:
                    for event in form.opening():
                        await reply.event(event)
                words.append(each)
                if form.stream:
                    await reply.event(form.delta(words), token=True)
            await self.finish(form, reply, words, "length")
        except TransferFailed as error:
            await self.fail(form, reply, str(error))
        except asyncio.CancelledError:
            if form.request_id not in machine.aborted:
                raise
            task.uncancel()
            abort = {"type": "abort", "message": "Abort in waiting queue"} if form.kind == "gen" else "abort"
            await self.finish(form, reply, words, abort)
        finally:
            machine.in_flight -= 1
            machine.aborted.discard(form.request_id)
            machine.running.pop(form.request_id, None)
            machine.later(machine.turn())

    async def finish(self, form, reply, words, reason):
        if not form.stream:
            return await reply.json(200, self.with_params(form, reply.fault, form.whole(words, reason)))
        for event in form.closing(words, reason):
            await reply.event(event)
        await self.end_stream(form, reply)

    def with_params(self, form, fault, answer):
        """vLLM's prefill side says where the KV lies."""
        wanted = self.options.engine == "vllm" and (form.body.get("kv_transfer_params") or {}).get("do_remote_decode")
        if wanted and fault.get("kind") != "no-params":
            params = self.machine.blocks.keep(form.request_id, digest(form.tokens), len(form.tokens))
            answer["kv_transfer_params"] = [params] if fault.get("kind") == "odd-params" else params
        return answer

    async def fail(self, form, reply, message):
        error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
        if not form.stream:
            return await self.refuse(reply, 500, message, "InternalServerError")
        await reply.event(form.error(error))
        await self.end_stream(form, reply)

    async def end_stream(self, form, reply):
        if form.ended:
            await reply.event(form.ended)
        await reply.end()

    async def refuse(self, reply, status, message, kind="BadRequestError"):
        error = {"message": message, "type": kind, "param": None, "code": status}
        await reply.json(status, {"error": error} if self.options.engine == "vllm" else {"object": "error", **error})

    async def get(self, path, reply):
        if path in ("/health", "/health_generate", "/ready", "/ping"):
            return await reply.json(200 if self.machine.ready and not self.machine.dead else 503, {})
        name = self.options.served_model_name
        models = {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": self.options.engine,
                                              "max_model_len": self.options.context}]}
        answers = {"/v1/models": models, "/get_model_info": {"model_path": name}, "/model_info": {"model_path": name},
                   "/get_server_info": {"disaggregation_mode": self.options.role, "served_model_name": name}}
        await (reply.json(200, answers[path]) if path in answers else self.refuse(reply, 404, "Not Found", "NotFoundError"))

    async def embed(self, body, reply):
        given = body.get("input")
        many = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        vectors = [[byte / 255 for byte in hashlib.sha256(repr(tokens_of(each)).encode()).digest()[:8]] for each in many]
        if body.get("encoding_format") == "base64":
            vectors = [base64.b64encode(struct.pack("<8f", *vector)).decode() for vector in vectors]
        count = sum(len(tokens_of(each)) for each in many)
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        await reply.json(200, {"object": "list", "data": data, "model": body.get("model"),
                               "usage": {"prompt_tokens": count, "total_tokens": count}})

    async def tokenize(self, body, reply):
        form = FORMS["/v1/chat/completions" if "messages" in body else "/v1/completions"]
        tokens = form({**body, "max_tokens": 1}, "", "", False).tokens
        await reply.json(200, {"tokens": tokens, "count": len(tokens), "max_model_len": self.options.context})

    async def detokenize(self, body, reply):
        text = bytes(tokens_of(body.get("tokens"))).decode("utf-8", "replace")
        await reply.json(200, {"prompt": text} if self.options.engine == "vllm" else {"text": text})

    async def abort(self, log, body, reply):
        for rid in list(self.machine.running) if body.get("abort_all") else [body.get("rid")]:
            log("abort", rid=rid, found=self.machine.abort(rid))
        await reply.whole(200, b"")

    async def set_budget(self, body, reply):
        budget = body.get("server_args", {}).get("tightrank_line_budget")
        if type(budget) is not int or budget <= 0:
            raise Bad("server_args: nothing to set")
        self.machine.budget = budget
        await self.machine.turn(budget=budget)
        await reply.json(200, [True])
