"""Keyformer: accumulated rows of a noisy softmax."""

from __future__ import annotations

import pytest
import torch
from harness import GOLDEN_KEYS, GOLDEN_QUERIES, prefill, shape

from sparsekv.policies import Gumbel, Keyformer, LayerPlan


def golden_noisy_prefill() -> torch.Tensor:
    """Probabilities [HQ, 8, 8] under zeta_hij = ((3h + 5i + 7j) mod 5 - 2) / 2 and tau = 1."""
    logits = 0.5 * GOLDEN_QUERIES[:, :8] @ GOLDEN_KEYS[:8].T
    h, i, j = (torch.arange(n).view(shape) for n, shape in ((2, (2, 1, 1)), (8, (8, 1)), (8, (8,))))
    noisy = logits + ((3 * h + 5 * i + 7 * j) % 5 - 2) / 2
    return noisy.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


def test_golden():
    policy = Keyformer(recent_fraction=0.5)
    row = prefill(policy, golden_noisy_prefill(), budget=8, num_kv_heads=2)
    f0 = [1.4144, 3.0961, 1.9344, 0.0837, 0.1831, 0.0217, 0.7991, 0.4673]
    f1 = [3.7836, 0.4510, 1.2513, 0.8557, 0.9058, 0.7388, 0.0077, 0.0060]
    torch.testing.assert_close(row.state, torch.tensor([[f0, f1]]), rtol=0, atol=6e-5)
    row = prefill(policy, golden_noisy_prefill(), budget=4, num_kv_heads=2)
    assert row.kept() == [[1, 2, 6, 7], [0, 2, 6, 7]]


@pytest.mark.parametrize(
    ("budget", "fraction", "recent"), [(12, 0.3, 3), (100, 0.29, 29), (1, 0.3, 0), (8, 1.0, 8)]
)
def test_budget_split(budget, fraction, recent):
    # First row: a prompt of 20 at 60 % and 30 % of it recent.
    plan = Keyformer(recent_fraction=fraction).plan(shape(2), 20, budget)
    assert set(plan) == {LayerPlan(budget, recent=recent, decode="evict")}


def test_noise_is_part_of_the_need():
    for phase in ("prefill", "decode"):
        need = Keyformer(seed=7, tau_steps=64).needs(0, phase)
        assert need.noise == Gumbel(7, 1.0, 2.0, 64, "gumbel") and need.rows is None
    assert Keyformer(noise="none").needs(0, "decode").noise.kind == "none"


@pytest.mark.parametrize(
    "arguments",
    [
        {"recent_fraction": 1.1},
        {"tau_start": 0.0},
        {"tau_start": 3.0},
        {"tau_end": float("inf")},
        {"tau_steps": 0},
        {"seed": -1},
        {"seed": 1 << 32},
        {"noise": "normal"},
        {"group": "layer_mean"},
    ],
)
def test_bad_hyper_parameters(arguments):
    with pytest.raises(ValueError, match="expected"):
        Keyformer(**arguments)
