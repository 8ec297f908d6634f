"""ExpectedAttention: golden scores, sinks, settings."""

from __future__ import annotations

import pytest
import torch
from harness import GOLDEN_KEYS, golden_features, golden_prefill, golden_source, prefill, shape

from sparsekv.policies import Expected, LayerPlan
from sparsekv.policies.features import ExpectedProbability, ValueNorm

QUESTION = ExpectedProbability(sinks=1)


def test_golden_moments_and_logits():
    mu, sigma = golden_source().ahead(QUESTION)
    expected = torch.tensor([[-0.5714, -0.4286, 0.7143, 0.4286], [0.7143, 0.5714, 0.7143, 0.1429]])
    torch.testing.assert_close(mu[0], expected, rtol=0, atol=6e-5)
    k = GOLDEN_KEYS[1:8].float()
    z = k @ mu[0].T / 2 + torch.einsum("jd,hde,je->jh", k, sigma[0], k) / 8
    z0 = [4.0612, 1.7092, 1.0357, -0.3061, 1.6582, 1.9541, 1.8010]
    z1 = [1.1224, 1.3367, 0.7398, 1.25, 3.2806, 2.1786, -0.1480]
    torch.testing.assert_close(z.T, torch.tensor([z0, z1]), rtol=0, atol=6e-5)
    p = torch.cat([torch.zeros(1), z.softmax(0).mean(1)])
    torch.testing.assert_close(golden_features(QUESTION)[0, 0], p, rtol=0, atol=1e-6)


def test_golden_scores_and_kept_set():
    score = golden_features(QUESTION) * golden_features(ValueNorm())
    expected = torch.tensor([0.0, 1.0494, 0.2256, 0.0930, 0.1268, 0.6785, 0.1865, 0.1171])
    torch.testing.assert_close(score[0, 0], expected, rtol=0, atol=6e-5)
    row = prefill(Expected(sinks=1), golden_prefill(), budget=4, features=golden_features)
    assert row.kept() == [[0, 1, 2, 5]]


def test_a_budget_below_the_sinks_gives_up_sinks():
    assert Expected().plan(shape(2), 99, 64) == (LayerPlan(64, sinks=4),) * 2
    assert Expected().plan(shape(1), 99, 3) == (LayerPlan(3, sinks=2),)
    assert Expected().plan(shape(1), 99, 1) == (LayerPlan(1, sinks=0),)


def test_settings_choose_the_features():
    assert Expected(sinks=2, future=9).features(0, "prefill") == (
        ExpectedProbability(2, 9, True),
        ValueNorm(),
    )
    plain = Expected(covariance=False, value_norm=False)
    assert plain.features(0, "prefill") == (ExpectedProbability(4, 512, False),)
    assert Expected().needs(0, "prefill") is None


@pytest.mark.parametrize(
    "wrong", [{"sinks": -1}, {"future": 0}, {"epsilon": -1e-3}, {"epsilon": float("nan")}]
)
def test_bad_settings(wrong):
    with pytest.raises(ValueError, match=r"expected .*, got"):
        Expected(**wrong)
