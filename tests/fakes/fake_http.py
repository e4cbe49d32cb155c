"""The fake engine's HTTP: the routes and refusals of vLLM and SGLang that a supervisor meets."""
import json
import threading
import time
from http.server import BaseHTTPRequestHandler


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine = None  # set in a subclass, one for each server

    def log_message(self, *_):
        pass

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, status, message):
        self.answer(status, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}})

    def handle_one_request(self):
        engine, options = self.engine, self.engine.options
        if options.mute is not None and engine.ready and time.monotonic() - engine.ready >= options.mute:
            threading.Event().wait()
        super().handle_one_request()

    def allowed(self):
        key = self.engine.options.api_key
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self.refuse(401, "Unauthorized")
            return False
        return True

    def do_GET(self):
        healthy = self.engine.ready and not self.engine.dead
        if self.path in ("/health", "/health_generate", "/ready"):
            self.answer(200 if healthy else 503, {})
        elif self.path == "/v1/models" or (self.engine.options.engine == "sglang" and
                                           self.path in ("/get_model_info", "/model_info")):
            name = self.engine.options.served_model_name
            self.answer(200, {"object": "list", "data": [{"id": name}], "model_path": name})
        else:
            self.refuse(404, "Not Found")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if not self.allowed():
            return
        route = {"/v1/completions": self.completions, "/generate": self.sglang_generate,
                 "/set_internal_state": self.set_internal_state}.get(self.path)
        try:
            route(body) if route else self.refuse(404, "Not Found")
        except OSError:  # a rank died under the request: the real engines drop the connection or answer 500
            self.refuse(500, "EngineCore encountered an issue.")

    def run(self, prompt, new_tokens):
        tokens = list(prompt.encode()) if isinstance(prompt, str) else prompt
        context = self.engine.options.context
        if len(tokens) + new_tokens > context:
            self.refuse(400, f"This model's maximum context length is {context} tokens. However, you requested "
                             f"{new_tokens} output tokens and your prompt contains {len(tokens)} input tokens.")
            return None
        answer, cached = self.engine.generate(tokens, new_tokens)
        return {"prompt_tokens": len(tokens), "completion_tokens": len(answer), "cached_tokens": cached}, answer

    def completions(self, body):
        if body.get("model") != self.engine.options.served_model_name:
            return self.refuse(404, f"The model `{body.get('model')}` does not exist.")
        if done := self.run(body["prompt"], body.get("max_tokens", 16)):
            usage, tokens = done
            if body.get("stream"):
                return self.stream(tokens)
            choice = {"index": 0, "text": bytes(tokens).decode("latin-1"), "finish_reason": "length"}
            if body.get("logprobs"):
                names = [f"token_id:{token}" if body.get("return_tokens_as_token_ids") else chr(token) for token in tokens]
                choice["logprobs"] = {"tokens": names, "token_logprobs": [-0.1] * len(tokens),
                                      "top_logprobs": [{name: -0.1, "token_id:999": -2.5} for name in names]}
            self.answer(200, {"id": "cmpl-0", "object": "text_completion", "choices": [choice], "usage": usage})

    def stream(self, tokens):
        """One event for each token; the end of the connection ends the body."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for token in tokens:
            choice = {"index": 0, "text": bytes([token]).decode("latin-1"), "finish_reason": None}
            self.wfile.write(b"data: " + json.dumps({"object": "text_completion", "choices": [choice]}).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def sglang_generate(self, body):
        prompt = body["input_ids"] if "input_ids" in body else body["text"]
        if done := self.run(prompt, body.get("sampling_params", {}).get("max_new_tokens", 16)):
            usage, tokens = done
            if body.get("return_logprob"):
                usage["output_token_logprobs"] = [[-0.1, token, None] for token in tokens]
                usage["output_top_logprobs"] = [[[-0.1, token, None], [-2.5, 999, None]] for token in tokens]
            self.answer(200, {"text": bytes(tokens).decode("latin-1"), "output_ids": tokens, "meta_info": usage})

    def set_internal_state(self, body):
        budget = body.get("server_args", {}).get("tightrank_line_budget")
        good = isinstance(budget, int) and not isinstance(budget, bool) and budget > 0
        if good:
            self.engine.budget = budget
            self.engine.tell(budget=budget)
        self.answer(200, [good])
