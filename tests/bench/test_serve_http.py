"""The serving benchmark against a server over HTTP: a stand-in that streams as vLLM does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sparsekv import cli
from sparsekv.bench import results
from sparsekv.bench.serve.http_engine import HttpEngine

LOAD = (
    "--lengths",
    "16/5",
    "--concurrency",
    "2",
    "--rounds",
    "2",
    "--requests",
    "4",
    "--warmup",
    "0",
)


class Server(ThreadingHTTPServer):
    """how: "tokens" streams one a piece, "pairs" two a piece, "busy" and "broken" do not answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.how, self.asked = "tokens", [{}][:0]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: Any) -> None:
        """pytest's output is for pytest."""

    def do_GET(self) -> None:
        self._start(200)
        self.wfile.write(json.dumps({"data": [{"id": "first-model"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body | {"key": self.headers.get("Authorization")})
        if self.server.how == "busy":
            self._start(503)
            self.wfile.write(b"come\nback later")
            return
        self._start(200)
        if self.server.how == "broken":
            self._send({"error": "engine died"})
            return
        piece = 2 if self.server.how == "pairs" else 1
        for _ in range(0, body["max_tokens"], piece):
            self._send({"choices": [{"text": " x"}], "usage": None})
        self._send({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _start(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()

    def _send(self, piece: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\n\n")


@pytest.fixture
def server() -> Iterator[Server]:
    pytest.importorskip("aiohttp", reason="needs aiohttp, which comes with vLLM")
    with Server() as one:
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def call(server: Server, out: Path, *more: str) -> Result:
    arguments = ["bench", "serve", "--base-url", server.url, *LOAD, "--out", str(out), *more]
    return CliRunner().invoke(cli.APP, arguments)


def test_a_server_is_measured(server: Server, tmp_path: Path) -> None:
    """Token ids, the exact length asked for in both ways, the first model of the server."""
    result = call(server, tmp_path, "--label", "dense", "--api-key", "k", "--rates", "50")
    assert result.exit_code == 0, result.output
    rows = results.read(tmp_path).rows
    assert [(row.contender, row.status, row.shape["kv_gib"]) for row in rows] == [
        ("dense", "measured", "unlimited")
    ] * 2
    assert rows[0].value > 0 and rows[0].extra["ttft_p50_ms"] > 0 and not rows[0].extra["failures"]
    assert "step_p50_ms" not in rows[0].extra and server.url in rows[0].about
    asked = server.asked[0]
    assert len(server.asked) == 8 and asked["model"] == "first-model" and asked["key"] == "Bearer k"
    assert len(asked["prompt"]) == 16 and all(2 <= token < 10_000 for token in asked["prompt"])
    assert (asked["max_tokens"], asked["min_tokens"], asked["ignore_eos"]) == (5, 5, True)
    other = call(server, tmp_path, "--label", "sparse", "--api-key", "k", "--resume")
    assert other.exit_code == 0 and len(results.read(tmp_path).rows) == 3


def test_several_tokens_a_piece(server: Server, tmp_path: Path) -> None:
    """The usage at the end says how many there were."""
    server.how = "pairs"
    assert call(server, tmp_path, "--model", "m").exit_code == 0
    (row,) = results.read(tmp_path).rows
    assert row.status == "measured" and not row.extra["failures"]
    assert server.asked[0]["model"] == "m"


@pytest.mark.parametrize(
    ("how", "reason"),
    [("busy", "HTTP 503: come back later"), ("broken", "the server says engine died")],
)
def test_errors_of_a_server(server: Server, tmp_path: Path, how: str, reason: str) -> None:
    server.how = how
    assert call(server, tmp_path).exit_code == 0
    (row,) = results.read(tmp_path).rows
    assert (
        row.status == "failed" and row.reason == f"4 of 4 requests failed: RuntimeError: {reason}"
    )


def test_no_server(server: Server, tmp_path: Path) -> None:
    gone = server.url
    server.server_close()
    result = CliRunner().invoke(cli.APP, ["bench", "serve", "--base-url", gone, *LOAD])
    assert result.exit_code == 2 and "expected a server at http" in result.stderr


def test_without_aiohttp(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsekv.bench.serve import http_engine

    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(http_engine, "import_module", missing)
    with pytest.raises(ValueError, match="expected aiohttp for --base-url"):
        HttpEngine("http://x/v1", None, 100, None)
