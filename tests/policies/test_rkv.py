"""R-KV: attention of the last queries against redundancy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import golden_prefill, golden_source, prefill, shape
from torch import Tensor
from torch.nn.functional import pad

from sparsekv.features import compute
from sparsekv.headwise import Queries
from sparsekv.policies import RKV, LayerPlan
from sparsekv.policies.base import pool_columns
from sparsekv.policies.features import Feature, GroupMaxWindow, KeySimilarity


def golden_features(feature: Feature) -> Tensor:
    """A feature of the worked example; its 4 dimensions and 4 zeros, for the kernels take 8."""
    source = golden_source()
    keys = replace(source.keys, k=pad(source.keys.k, (0, 4)))

    def last(rows: int) -> Queries:
        queries = source.last(rows)
        return replace(queries, q=pad(queries.q, (0, 4)))

    return compute(feature, replace(source, keys=keys, last=last))


def test_golden_features():
    attention = golden_features(GroupMaxWindow(2))
    raw = [0.1454, 0.1972, 0.1933, 0.1454, 0.1055, 0.2132]
    torch.testing.assert_close(attention[0, 0, :6], torch.tensor(raw), rtol=0, atol=6e-5)
    pooled = pool_columns(attention, 3, "max", torch.tensor([[6]]))[0, 0, :6]
    expected = torch.tensor([0.1972, 0.1972, 0.1972, 0.1933, 0.2132, 0.2132])
    torch.testing.assert_close(pooled, expected, rtol=0, atol=6e-5)
    redundancy = golden_features(KeySimilarity(0.5))[0, 0]
    expected = [0.1475, 0.1213, 0.1253, 0.1157, 0.1066, 0.1279, 0.1336, 0.1222]
    torch.testing.assert_close(redundancy, torch.tensor(expected), rtol=0, atol=6e-5)


@pytest.mark.parametrize("mix", [0.07, 0.1])
def test_golden_kept_set(mix):
    policy = RKV(window=2, kernel=3, mix=mix)
    row = prefill(policy, golden_prefill(), budget=4, features=golden_features)
    assert row.kept() == [[3, 4, 6, 7]]


def test_plan_and_presets():
    plan = RKV(buffer=16).plan(shape(2), 999, 64)
    assert set(plan) == {LayerPlan(79, 0, 8, "interval", prefill=64, low=64)}
    assert RKV().plan(shape(), 999, 5)[0].recent == 5
    assert RKV.code() == RKV(mix=0.07)
    assert RKV.signed


@pytest.mark.parametrize(
    "arguments",
    [{"window": 0}, {"kernel": 4}, {"similarity": 1.5}, {"mix": -0.1}, {"buffer": 0}],
)
def test_bad_hyper_parameters(arguments):
    with pytest.raises(ValueError, match="expected"):
        RKV(**arguments)
