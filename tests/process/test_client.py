"""The commands that talk to a supervisor, when what answers is something else."""
from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers import free_ports, tightrank

BODIES = {"/html": b"<html>", "/list": b"[]", "/other": b'{"error": "no"}'}


@pytest.fixture
def other() -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(next(body for path, body in BODIES.items() if self.path.startswith(path)))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_another_server_is_not_taken_for_a_supervisor(other: str) -> None:
    for path in BODIES:
        done = tightrank("status", "--url", other + path)
        assert done.returncode == 69 and done.stderr.count("\n") == 1 and "not ours" in done.stderr, done.stderr


@pytest.mark.parametrize("words", [("status", "--url", "http://[::"), ("status", "--url", "ftp://x"),
                                   ("status", "--url", f"http://127.0.0.1:{free_ports(1)[0]}"),
                                   ("drain", "a\nb/../c?", "--url", f"http://127.0.0.1:{free_ports(1)[0]}")])
def test_nobody_answers_is_one_line(words: tuple[str, ...]) -> None:
    done = tightrank(*words)
    assert done.returncode == 69 and done.stderr.count("\n") == 1, done.stderr


def test_a_token_that_no_header_can_hold_is_one_line() -> None:
    done = tightrank("drain", "w", "--url", "http://127.0.0.1:1", env={"TIGHTRANK_TOKEN": "schl\xfcssel"})
    assert done.returncode == 69 and "TIGHTRANK_TOKEN" in done.stderr and "Traceback" not in done.stderr


def test_a_negative_count_of_lines_is_refused() -> None:
    done = tightrank("logs", "-n", "-5")
    assert done.returncode == 2 and "whole number" in done.stderr
