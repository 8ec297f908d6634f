"""The serving benchmark against a server over HTTP: a stand-in that streams as vLLM does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from completions_server import Server, serving
from typer.testing import CliRunner, Result

from sparsekv import cli
from sparsekv.bench import results

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


class Streaming:
    """how: "tokens" streams one a piece, "pairs" two a piece, "busy" and "broken" do not answer."""

    def __init__(self) -> None:
        self.how = "tokens"

    def __call__(self, body: dict[str, Any], to: Any) -> None:
        if self.how == "busy":
            to.start(503)
            to.wfile.write(b"come\nback later")
            return
        to.start(200)
        if self.how == "broken":
            self._send(to, {"error": "engine died"})
            return
        piece = 2 if self.how == "pairs" else 1
        for _ in range(0, body["max_tokens"], piece):
            self._send(to, {"choices": [{"text": " x"}], "usage": None})
        self._send(to, {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        to.wfile.write(b"data: [DONE]\n\n")

    def _send(self, to: Any, piece: dict[str, Any]) -> None:
        to.wfile.write(b"data: " + json.dumps(piece).encode() + b"\n\n")


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Streaming()) as one:
        yield one


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
    server.answer.how = "pairs"
    assert call(server, tmp_path, "--model", "m").exit_code == 0
    (row,) = results.read(tmp_path).rows
    assert row.status == "measured" and not row.extra["failures"]
    assert server.asked[0]["model"] == "m"


@pytest.mark.parametrize(
    ("how", "reason"),
    [("busy", "HTTP 503: come back later"), ("broken", "the server says engine died")],
)
def test_errors_of_a_server(server: Server, tmp_path: Path, how: str, reason: str) -> None:
    server.answer.how = how
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
