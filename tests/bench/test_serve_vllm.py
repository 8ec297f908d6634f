"""The serving benchmark with vLLM itself, a tiny random Llama on whatever device there is."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparsekv import cli
from sparsekv.bench import results

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="needs vLLM, in an environment of its own"
    ),
]
PROMPT, NEW = 100, 20
FIGURES = {
    "total_tok_s", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms",
    "itl_p99_ms", "step_p50_ms", "step_mean_ms", "running_mean", "running_max", "preemptions",
    "kv_blocks", "kv_blocks_mean", "kv_blocks_max", "kv_gib_mean", "kv_gib_max", "failures",
}  # fmt: skip


def test_dense_at_two_loads(tmp_path: Path) -> None:
    """What the engine says of itself is what these requests must have held."""
    arguments = ["--shape", "tiny", "--modes", "dense", "--kv-gib", "0.05", "--warmup", "2"]
    load = ["--lengths", f"{PROMPT}/{NEW}", "--concurrency", "1,4", "--rounds", "2"]
    # Blocks of the size that every version's CPU and GPU kernels know.
    engine = ["--engine", '{"block_size": 32}', "--out", str(tmp_path)]
    run = CliRunner().invoke(cli.APP, ["bench", "serve", *arguments, *load, *engine])
    assert run.exit_code == 0, run.output
    log = (tmp_path / "dense-0.05.log").read_text()
    rows = results.read(tmp_path).rows
    assert [(row.status, row.reason) for row in rows] == [("measured", "")] * 2, log[-3000:]
    for row, clients in zip(rows, (1, 4), strict=True):
        assert set(row.extra) >= FIGURES
        assert row.extra["failures"] == row.extra["preemptions"] == row.extra["kv_blocks_left"] == 0
        assert row.extra["running_max"] == clients
        assert row.extra["total_tok_s"] == pytest.approx(row.value * (PROMPT + NEW) / NEW)
        most = clients * -(-(PROMPT + NEW) // 32)
        assert 0.8 * most <= row.extra["kv_blocks_max"] <= most + clients
        assert row.extra["kv_gib_max"] < 0.05 and row.extra["ttft_p50_ms"] > 0
        # Six layers of 2 KV heads of 32 bf16 numbers, K and V.
        block = row.extra["kv_gib_max"] / row.extra["kv_blocks_max"] * 2**30
        assert block == pytest.approx(32 * 6 * 2 * 2 * 32 * 2, rel=1e-6)
    with (tmp_path / "serve.csv").open() as file:
        assert [line["status"] for line in csv.DictReader(file)] == ["measured"] * 2
