"""SmolLM2-135M finds needles with a dense cache, and not behind a window. Slow."""

from __future__ import annotations

from pathlib import Path

import pytest
from smollm import needs_smollm

from sparsekv.evaluation.example import Request
from sparsekv.evaluation.runner import evaluate
from sparsekv.evaluation.tasks import TASKS
from sparsekv.models import load

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the evaluation texts in {DATA}")
@needs_smollm
def test_needles():
    """16 questions about 2 contexts; of 4 contexts the smoke run asks the same of both policies."""
    model, tokenizer = load(None, device="cpu", dtype="bfloat16")
    task = TASKS["needle-1k"](Request(tokenizer, DATA, 2, 0))
    em = {}
    for policy in ("full", "streaming"):
        found = evaluate(model, tokenizer, task, policy, 256, "question-agnostic")
        em[policy] = sum(record.em for record in found) / len(found)
    assert em["full"] >= 0.75 and em["streaming"] <= 0.35
