"""experiments/served_needle.py: its table, and, with vLLM, its command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from engines import environment, model, needs_vllm

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
sys.path.insert(0, str(ROOT / "experiments"))

import served_needle  # noqa: E402
from outcome import read_csv  # noqa: E402


def said(scores: dict[str, list[float]]) -> list[dict]:
    return [
        {"task": "t", "example": example, "em": em} for example, of in scores.items() for em in of
    ]


def test_the_table_compares_on_the_same_contexts() -> None:
    answers = {
        "dense": said({"0": [1.0, 1.0], "1": [1.0, 0.0]}),
        "streaming": said({"0": [0.0, 1.0], "1": [0.0, 0.0]}),
    }
    dense, streaming = served_needle.table(answers)
    assert (dense["em"], dense["to_dense"], dense["questions"]) == (0.75, 0.0, 4)
    assert (streaming["em"], streaming["to_dense"]) == (0.25, -0.5)
    assert streaming["to_dense_low"] <= -0.5 <= streaming["to_dense_high"]


@needs_vllm
@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason=f"needs the evaluation texts in {DATA}")
def test_the_command(tmp_path: Path) -> None:
    """Finds a needle with all of 1024 tokens, and with layersplit; a second run reads the files."""
    line = [sys.executable, str(ROOT / "experiments" / "served_needle.py"), "--data", str(DATA)]
    line += ["--out", str(tmp_path), "--model", model(), "--samples", "2", "--tasks", "needle-1k"]
    line += ["--modes", "dense,layersplit"]
    for _ in range(2):
        done = subprocess.run(
            line, env=environment(), capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
    assert "Processed prompts" not in done.stderr
    rows = read_csv(tmp_path / "table.csv")
    assert [(row["mode"], row["contexts"]) for row in rows] == [("dense", 2), ("layersplit", 2)]
    assert sum(row["em"] for row in rows) > 0 and (tmp_path / "run.json").exists()
