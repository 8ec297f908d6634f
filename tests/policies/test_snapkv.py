"""SnapKV: votes of the last queries, pooled."""

from __future__ import annotations

import warnings

import pytest
import torch
from harness import columns, golden_decode, golden_prefill, prefill, shape
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.policies import AdaKV, Chunked, CriticalKV, LayerPlan, Need, SnapKV, Stats


def pooled(values, *, kernel, pool, recent=0, length=None):
    """Scores that SnapKV gives to one row of votes."""
    votes = torch.tensor(values, dtype=torch.float32)[None, None]
    positions = torch.arange(len(values), dtype=torch.int32)[None, None]
    lengths = torch.tensor([[length or len(values)]], dtype=torch.int32)
    stats = Stats(votes, None, positions, lengths, torch.tensor([recent], dtype=torch.int32))
    return SnapKV(kernel=kernel, pool=pool).score(0, stats)[0, 0].tolist()


def test_golden_votes():
    votes = columns(golden_prefill(), Need("sum", rows=2), num_kv_heads=2)[0, :, :6]
    h0 = [0.1073, 0.2369, 0.2384, 0.0119, 0.2298, 0.0438]
    h1 = [0.1321, 0.1232, 0.5218, 0.5209, 0.0706, 0.5942]
    torch.testing.assert_close(votes, torch.tensor([h0, h1]), rtol=0, atol=6e-5)


@pytest.mark.parametrize(
    ("pool", "kernel", "kept"),
    [
        ("none", 7, [2, 5, 6, 7]),
        ("avg", 3, [2, 3, 6, 7]),
        ("max", 3, [2, 3, 6, 7]),  # votes 1, 2, 3 tie exactly: the oldest loses
        ("max", 1, [2, 5, 6, 7]),
    ],
)
def test_golden_kept_sets(pool, kernel, kept):
    row = prefill(SnapKV(window=2, kernel=kernel, pool=pool), golden_prefill(), budget=4)
    assert row.kept() == [kept]
    row.decode(8, golden_decode)  # decoding appends
    assert row.kept() == [[*kept, 8]]


def test_golden_per_query_head():
    row = prefill(SnapKV(2, 3, "avg"), golden_prefill(), budget=4, num_kv_heads=2)
    assert row.kept() == [[1, 2, 6, 7], [2, 4, 6, 7]]


@pytest.mark.parametrize(
    ("pool", "scores"),
    [
        ("avg", [0.0999, 0.2266, 0.2755, 0.2656, 0.2452, 0.1564]),
        ("max", [0.1801, 0.3801, 0.3801, 0.3801, 0.3190, 0.3190]),
    ],
)
def test_golden_pooled_scores(pool, scores):
    votes = columns(golden_prefill(), Need("sum", rows=2), num_kv_heads=1)[0, 0].tolist()
    got = pooled(votes, kernel=3, pool=pool, recent=2)[:6]
    assert got == pytest.approx(scores, abs=6e-5)


def test_pooling_edges():
    assert pooled([3, 0, 0], kernel=3, pool="avg") == [1, 1, 0]  # padding counts
    assert pooled([3], kernel=3, pool="avg") == [1]
    assert pooled([3, -1, -2], kernel=3, pool="max") == [3, 3, -1]


def test_neither_the_window_nor_padding_leaks_into_the_pool():
    for pool in ("avg", "max"):
        clean = pooled([1, 2, 0], kernel=3, pool=pool)
        assert pooled([1, 2, 0, 99, 99], kernel=3, pool=pool, recent=2)[:3] == clean
        ragged = pooled([1, 2, 0, 99, float("nan")], kernel=3, pool=pool, recent=1, length=4)
        assert ragged[:3] == clean


@given(tokens=st.integers(1, 40), budget=st.integers(1, 40), window=st.integers(1, 40))
def test_the_newest_tokens_of_the_window_survive(tokens, budget, window):
    generator = torch.Generator().manual_seed(tokens * 1681 + budget * 41 + window)
    probabilities = torch.rand(2, tokens, tokens, generator=generator).tril()
    (kept,) = prefill(SnapKV(window=window, kernel=3), probabilities, budget).kept()
    assert len(kept) == min(tokens, budget)
    assert kept[-min(window, len(kept)) :] == list(range(tokens))[-min(window, len(kept)) :]


def test_presets_keep_their_published_numbers():
    presets = {
        "paper_tables": (32, 7, "max"),
        "needle": (16, 5, "max"),
        "original": (32, 5, "avg"),
        "longbench": (8, 7, "max"),
        "kvpress": (64, 5, "avg"),
    }
    for name, numbers in presets.items():
        policy = getattr(SnapKV, name)()
        assert (policy.window, policy.kernel, policy.pool) == numbers
        assert policy.group == "mean"
    assert SnapKV() == SnapKV.paper_tables()


def test_plan_is_uniform_and_needs_only_the_window_rows():
    policy = SnapKV(window=16)
    assert set(policy.plan(shape(5), 999, 64)) == {LayerPlan(64, recent=16)}
    assert policy.plan(shape(1), 999, 10)[0].recent == 10
    assert policy.needs(0, "prefill") == Need("sum", rows=16, group="mean")
    assert policy.needs(0, "decode") is None


def test_a_budget_of_the_window_alone_is_not_silent():
    """It keeps the newest tokens, whatever is attended; a prompt within it loses nothing."""
    for policy in (SnapKV(), AdaKV(), CriticalKV(), Chunked()):
        with pytest.warns(UserWarning, match="snapkv keeps the newest 32 tokens .* window=32"):
            policy.plan(shape(3), 100, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SnapKV().plan(shape(3), 100, 33)
        SnapKV().plan(shape(3), 32, 32)
        SnapKV(window=8).plan(shape(3), 100, 32)
