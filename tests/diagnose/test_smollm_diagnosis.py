"""SmolLM2-135M: figures against its softmax matrices, and what is known of the model. Slow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from eager import record
from smollm import needs_smollm

from sparsekv.diagnose import attention, massive
from sparsekv.diagnose.curves import loss_curves
from sparsekv.diagnose.texts import first_ids, read_texts
from sparsekv.models import load
from sparsekv.policies import SnapKV

pytestmark = [
    pytest.mark.slow,
    needs_smollm,
]


@pytest.fixture(scope="module")
def smollm():
    """(model in fp32 on the CPU, ids [1, 160] of Python's help)."""
    model, tokenizer = load(None, device="cpu", dtype=torch.float32)
    return model, first_ids(tokenizer, read_texts(None)[0], 160)


def test_attention_is_that_of_its_matrices(smollm):
    model, ids = smollm
    table, layers = attention(model, ids, sinks=4, recent=32, top=(8, 32)), record(model, ids)
    rows = slice(36, None)
    age = torch.arange(160)[rows, None] - torch.arange(160)
    for i, layer in enumerate(layers):
        p = layer.p[:, rows]
        truth = {
            "sink_share": p[..., :4].sum(-1).mean(-1),
            "locality": (p * (age < 32)).sum(-1).mean(-1),
            "entropy": torch.special.entr(p).sum(-1).mean(-1),
        }
        for name, value in truth.items():
            found = getattr(table, name)[i].double()
            torch.testing.assert_close(found, value, atol=1e-4, rtol=1e-3)
        best = p.sum(1).sort(-1, descending=True).values.cumsum(-1)
        shares = best[:, [7, 31]] / best[:, -1:]
        torch.testing.assert_close(table.mass[i].double(), shares, atol=1e-4, rtol=1e-3)


def test_mass_curves_are_those_of_its_matrices(smollm):
    """Ranks may differ where votes nearly tie; the mass at a count hardly does."""
    model, ids = smollm
    scorer = SnapKV(window=8, pool="none")
    curves = loss_curves(model, [ids], scorer=scorer, later=32, measure="mass")
    for i, layer in enumerate(record(model, ids)):
        votes = layer.by_kv_head(layer.p[:, 120:128, :128].sum(1))
        votes[:, 120:] = torch.inf
        later = layer.by_kv_head(layer.p[:, 128:, :128].mean(1))
        kept = later.gather(-1, votes.argsort(-1, descending=True)).cumsum(-1)
        missed = (kept[:, -1:] - kept[:, curves.slots - 1]) / 90
        np.testing.assert_allclose(curves.loss[0, i], missed.numpy(), atol=2e-5)


def test_its_massive_activation_makes_its_sink(smollm):
    """One token of the first layers' doing, the first; attention goes there behind it."""
    model, ids = smollm
    seen, table = massive(model, ids), attention(model, ids, sinks=1, recent=32)
    assert seen.positions == (0,)
    first = min(one.layer for one in seen.found)
    share = table.sink_share.mean(1)
    assert float(share[first + 1 :].mean()) > 0.2 > 0.1 > float(share[first])
