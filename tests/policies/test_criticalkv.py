"""CriticalKV: two stages, around AdaKV too."""

from __future__ import annotations

import pytest
import torch
from harness import columns, golden_features, golden_prefill, prefill, topk

from sparsekv.policies import (
    H2O,
    AdaKV,
    Chunked,
    CriticalKV,
    Expected,
    Knorm,
    Need,
    SnapKV,
    Stats,
    Streaming,
)
from sparsekv.policies.features import ProjectedValueNorm

NORMS = [6.0, 4, 6, 4, 6, 3, 2, 5]


def golden(feature):
    """|v_j|_1, which is what W_O = I in every head gives."""
    assert feature == ProjectedValueNorm()
    return torch.tensor([[NORMS]])


def test_golden_stages():
    policy = CriticalKV(SnapKV(window=2, pool="none"))
    votes = columns(golden_prefill(), Need("sum", rows=2), num_kv_heads=1)[0, 0, :6]
    second = (votes / 2 + 1e-4) * torch.tensor(NORMS[:6])
    expected = torch.tensor([0.3597, 0.3605, 0.4513, 0.4788])
    torch.testing.assert_close(second[[0, 1, 4, 5]], expected, rtol=0, atol=6e-5)
    row = prefill(policy, golden_prefill(), budget=4, features=golden)
    assert row.kept() == [[2, 3, 6, 7]]


def test_shares():
    snap, norms = SnapKV(window=2, pool="none"), torch.tensor([[[9.0, 9, 1, 1, 9, 1, 1, 1]]])
    plain = prefill(snap, golden_prefill(), 4).kept()
    all_first = CriticalKV(snap, first_share=1.0)
    assert prefill(all_first, golden_prefill(), 4, features=lambda _: norms).kept() == plain
    none_first = CriticalKV(snap, first_share=0.0)
    assert prefill(none_first, golden_prefill(), 4, features=lambda _: norms).kept() == [
        [1, 4, 6, 7]
    ]


def test_around_adakv_the_counts_are_adakvs():
    heads, tokens = 2, 30
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(1, heads, tokens, generator=generator) ** 4
    scores[:, 1] *= 0.3
    lengths = torch.full((1, heads), tokens, dtype=torch.int32)
    positions = torch.arange(tokens, dtype=torch.int32).expand(1, heads, -1)
    norms = {ProjectedValueNorm(): torch.rand(1, heads, tokens, generator=generator)}
    stats = Stats(scores, None, positions, lengths, torch.tensor([4]), norms)
    keep, protected = torch.full_like(lengths, 10), positions >= tokens - 4
    ada = AdaKV(SnapKV(window=4))
    plain = ada.select(scores, keep, protected, topk, layer=0, stats=stats)
    critical = CriticalKV(ada).select(scores, keep, protected, topk, layer=0, stats=stats)
    assert torch.equal(plain.count, critical.count)
    assert plain.count.sum() == 20 and plain.count[0, 0] > plain.count[0, 1]
    assert not torch.equal(plain.index, critical.index)
    assert CriticalKV(ada).ragged and not CriticalKV().ragged
    assert CriticalKV.ada().scorer.mode == "safeguard"


@pytest.mark.parametrize(
    ("scorer", "reason"),
    [
        (H2O(), "whose decode steps evict"),
        (Streaming(), "whose decode steps replace"),
        (Knorm(), "without negative scores"),
        (AdaKV(Knorm()), "without negative scores"),
        (Expected(), "value_norm=False"),
        (Chunked(), "in its own way"),
        (CriticalKV(), "in its own way"),
        ("snapkv", "a policy object"),
    ],
)
def test_scorers_that_are_refused(scorer, reason):
    with pytest.raises(ValueError, match=reason):
        CriticalKV(scorer)


def test_features_come_on_top_of_the_scorers():
    inner = Expected(value_norm=False)
    features = CriticalKV(inner).features(0, "prefill")
    assert features == (*inner.features(0, "prefill"), ProjectedValueNorm())
    assert golden_features is not None
    assert CriticalKV(inner)._epsilon(0) == 1e-4
    assert CriticalKV(SnapKV(window=8))._epsilon(0) == pytest.approx(8e-4)
