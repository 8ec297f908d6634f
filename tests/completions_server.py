"""A stand-in for an OpenAI-compatible server: it says what a test wants it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class Server(ThreadingHTTPServer):
    """answer: called with a request's body and key; writes what is sent back."""

    daemon_threads = True

    def __init__(self, answer: Callable[[dict[str, Any], BaseHTTPRequestHandler], None]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.asked = answer, [{}][:0]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: Any) -> None:
        """pytest's output is for pytest."""

    def do_GET(self) -> None:
        self.start(200)
        self.wfile.write(json.dumps({"data": [{"id": "first-model"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body | {"key": self.headers.get("Authorization")})
        self.server.answer(body, self)

    def start(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()


@contextmanager
def serving(answer: Callable[[dict[str, Any], Any], None]) -> Iterator[Server]:
    """A server that runs as long as this context."""
    pytest.importorskip("aiohttp", reason="needs aiohttp, which comes with vLLM")
    with Server(answer) as one:
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        yield one
        one.shutdown()
        thread.join()
