"""The server: `python3 -m atom.entrypoints.openai_server --model M --server-port P`. Its /health is always well."""
import argparse
import json
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from atom.config import Case, Config
from atom.model_engine.engine_core import log
from atom.model_engine.engine_core_mgr import CoreManager


def parse():
    parser = argparse.ArgumentParser(description="ATOM, a stand-in")
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--server-port", type=int, default=8000)
    parser.add_argument("--port", type=int, default=8006)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    return parser.parse_args()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cores, opens, name = None, 0.0, ""

    def log_message(self, *_):
        pass

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer(200, {"status": "ok"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions" or time.monotonic() < self.opens:
            return self.answer(500, {"detail": "not now"})
        if not isinstance(body["prompt"], str) or body["model"] != self.name:
            return self.answer(422, {"detail": "Input should be a valid string"})
        self.answer(200, {"object": "text_completion", "choices": [{"text": self.cores.generate(body["prompt"])}]})


def main():
    args = parse()
    log(f"Initializing engine with model {args.model}...")
    config = Config(args.model, args.tensor_parallel_size, args.pipeline_parallel_size, args.gpu_memory_utilization,
                    args.max_num_seqs, args.max_model_len, args.port)
    Handler.name, Handler.cores = args.served_model_name or args.model, CoreManager(config)
    Handler.opens = time.monotonic() + Case().late
    ThreadingHTTPServer.daemon_threads = True
    server = ThreadingHTTPServer((args.host, args.server_port), Handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    log(f"Starting server on {args.host}:{args.server_port}...")
    server.serve_forever(0.05)
    Handler.cores.close()
    sys.exit(0)


if __name__ == "__main__":
    main()
