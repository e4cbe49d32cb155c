"""What the fake P/D engine's answers look like, for each path that generates: what is asked, each event, the whole.

A form is made for one request. Tokens are bytes of the prompt; a token of the answer is a word: the first is the digest of
the prompt as the prefill side knows it, the others are numbered, so that a hole or a repetition shows.
"""
import json

CREATED = 1_800_000_000
MOST_TOKENS = 1 << 20


class Bad(Exception):
    """Refused with 400 and this sentence."""


def word(digest, number):
    return digest if number == 0 else f" {number}"


def event(answer, name=None):
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(answer).encode() + b"\n\n"


def whole_number(body, name, least=1):
    """A count in a request. Raises Bad for anything else."""
    value = body[name]
    if type(value) is not int or not least <= value <= MOST_TOKENS:
        raise Bad(f"{name}: {value!r:.50} is no integer from {least} to {MOST_TOKENS}")
    return value


def tokens_of(prompt):
    """The prompt's tokens; a batch counts as one. Raises Bad for what is no prompt."""
    if isinstance(prompt, str):
        return list(prompt.encode())
    if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
        return prompt
    if isinstance(prompt, list) and prompt:
        return [token for each in prompt for token in tokens_of(each)]
    raise Bad(f"prompt: {prompt!r:.50} is neither text nor tokens")


class Form:
    """`kind` names it. `head_first`: a stream's status goes out before the first token is there. `rid`: where a body names the
    request for SGLang."""
    rid = "rid"
    ended = b"data: [DONE]\n\n"
    limits = ("max_tokens",)

    def __init__(self, body, request_id, model, head_first):
        self.body, self.request_id, self.model, self.head_first = body, request_id, model, head_first
        self.stream = bool(body.get("stream", False))
        self.tokens = tokens_of(self.prompt())
        name = next((name for name in self.limits if self.asked(name) is not None), None)
        self.new_tokens = whole_number(self.options(), name) if name else 16

    def options(self):
        return self.body

    def asked(self, name):
        return self.options().get(name)

    def prompt(self):
        if "prompt" not in self.body:
            raise Bad("prompt: missing")
        return self.body["prompt"]

    def usage(self, words):
        return {"prompt_tokens": len(self.tokens), "completion_tokens": len(words),
                "total_tokens": len(self.tokens) + len(words)}

    def with_usage(self):
        return (self.body.get("stream_options") or {}).get("include_usage")

    def opening(self):
        return ()

    def error(self, error):
        return event({"error": error})


class Completion(Form):
    kind, name = "cmpl", "text_completion"

    def answer(self, choices, **more):
        return {"id": self.request_id, "object": self.name, "created": CREATED, "model": self.model, "choices": choices, **more}

    def choice(self, text, finish):
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}

    def delta(self, words):
        return event(self.answer([self.choice(words[-1], None)]))

    def closing(self, words, finish):
        yield event(self.answer([self.choice("", finish)]))
        if self.with_usage():
            yield event(self.answer([], usage=self.usage(words)))

    def whole(self, words, finish):
        return self.answer([self.choice("".join(words), finish)], usage=self.usage(words))


class Chat(Completion):
    kind, name = "chatcmpl", "chat.completion"
    limits = ("max_completion_tokens", "max_tokens")

    def prompt(self):
        messages = self.body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise Bad("messages: a list of objects is needed")
        return "".join(f"<{each.get('role')}>{self.text(each.get('content'))}" for each in messages)

    @staticmethod
    def text(content):
        if isinstance(content, list):
            return "".join(str(part.get("text", "")) for part in content)
        return "" if content is None else str(content)

    def calls(self, words):
        """A tool call for the first tool of the request: its argument is the text."""
        tool = self.body["tools"][0]["function"]["name"]
        return [{"id": "call_0", "type": "function", "index": 0,
                 "function": {"name": tool, "arguments": json.dumps({"text": "".join(words)})}}]

    def chunk(self, delta, finish=None, **more):
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
        return event({**self.answer(choices, **more), "object": "chat.completion.chunk"})

    def opening(self):
        yield self.chunk({"role": "assistant", "content": ""})

    def delta(self, words):
        return b": tools wait for the whole\n\n" if self.body.get("tools") else self.chunk({"content": words[-1]})

    def closing(self, words, finish):
        if self.body.get("tools") and finish == "length":
            yield self.chunk({"tool_calls": self.calls(words)})
            finish = "tool_calls"
        yield self.chunk({}, finish)
        if self.with_usage():
            yield event({**self.answer([], usage=self.usage(words)), "object": "chat.completion.chunk"})

    def whole(self, words, finish):
        message = {"role": "assistant", "content": "".join(words)}
        if self.body.get("tools") and finish == "length":
            message, finish = {"role": "assistant", "content": None, "tool_calls": self.calls(words)}, "tool_calls"
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return self.answer([choice], usage=self.usage(words))


class Responses(Form):
    """Its stream has named events and no [DONE]: `response.completed` is the end."""
    kind, ended, limits, rid = "resp", b"", ("max_output_tokens",), "request_id"
    sequence = 0

    def prompt(self):
        given = self.body.get("input")
        if isinstance(given, list):
            return "".join(Chat.text(each.get("content")) for each in given)
        if not isinstance(given, str):
            raise Bad("input: text or a list of messages is needed")
        return given

    def usage(self, words):
        return {"input_tokens": len(self.tokens), "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": len(words), "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": len(self.tokens) + len(words)}

    def whole(self, words, finish, status="completed"):
        content = [{"type": "output_text", "text": "".join(words), "annotations": []}]
        item = {"type": "message", "id": "msg_0", "role": "assistant", "status": status, "content": content}
        return {"id": self.request_id, "object": "response", "created_at": CREATED, "status": status, "model": self.model,
                "output": [item] if words else [], "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
                "error": None, "incomplete_details": None, "usage": self.usage(words) if words else None}

    def named(self, name, **fields):
        self.sequence += 1
        return event({"type": name, "sequence_number": self.sequence - 1, **fields}, name)

    def opening(self):
        yield self.named("response.created", response=self.whole((), None, "in_progress"))
        item = {"type": "message", "id": "msg_0", "role": "assistant", "status": "in_progress", "content": []}
        yield self.named("response.output_item.added", output_index=0, item=item)
        part = {"type": "output_text", "text": "", "annotations": []}
        yield self.named("response.content_part.added", item_id="msg_0", output_index=0, content_index=0, part=part)

    def delta(self, words):
        return self.named("response.output_text.delta", item_id="msg_0", output_index=0, content_index=0, delta=words[-1],
                          logprobs=[])

    def error(self, error):
        return self.named("error", code=str(error["code"]), message=error["message"], param=None)

    def closing(self, words, finish):
        status = "completed" if finish == "length" else "incomplete"
        yield self.named(f"response.{status}", response=self.whole(words, finish, status))


class Generate(Form):
    """SGLang's own path: each event holds the text so far."""
    kind, limits = "gen", ("max_new_tokens",)

    def options(self):
        return self.body.get("sampling_params") or {}

    def prompt(self):
        if "input_ids" not in self.body and "text" not in self.body:
            raise Bad("Either text, input_ids or input_embeds should be provided.")
        return self.body["input_ids"] if "input_ids" in self.body else self.body["text"]

    def whole(self, words, finish):
        reason = None if finish is None else {"type": finish, "length": len(words)} if isinstance(finish, str) else finish
        return {"text": "".join(words), "output_ids": list(range(len(words))),
                "meta_info": {"id": self.request_id, "finish_reason": reason, "prompt_tokens": len(self.tokens),
                              "completion_tokens": len(words), "cached_tokens": 0}}

    def delta(self, words):
        return event(self.whole(words, None))

    def closing(self, words, finish):
        yield event(self.whole(words, finish))

    def error(self, error):
        return event(self.whole([], {"type": "abort", "message": error["message"], "status_code": error["code"]}))


FORMS = {"/v1/completions": Completion, "/v1/chat/completions": Chat, "/v1/responses": Responses, "/generate": Generate}
