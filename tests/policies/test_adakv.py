"""AdaKV: golden allocations, exact totals, guarantees."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from harness import columns, golden_prefill, shape, topk
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.policies import (
    H2O,
    AdaKV,
    Chunked,
    CriticalKV,
    Full,
    Knorm,
    LayerSplit,
    Need,
    Pyramid,
    SnapKV,
    Stats,
    Streaming,
)
from sparsekv.policies.adakv import equal_shares, rounded
from sparsekv.policies.budgets import exact, largest_remainder


def run(policy, scores, keep, recent, lengths=None, layer=0):
    """Kept indices by row and head, and the counts."""
    batch, heads, tokens = scores.shape
    if lengths is None:
        lengths = torch.full((batch, heads), tokens, dtype=torch.int32)
    positions = torch.arange(tokens, dtype=torch.int32).expand(batch, heads, -1)
    protected = positions >= (lengths - recent)[..., None]
    stats = Stats(scores, None, positions, lengths, torch.full((batch,), recent))
    chosen = policy.select(
        scores, torch.full_like(lengths, keep), protected,
        lambda s, k, p, n=None: topk(s, k, p, lengths if n is None else n),
        layer=layer, stats=stats,
    )  # fmt: skip
    return [[[i for i in head if i >= 0] for head in row] for row in chosen.index.tolist()]


def golden_scores():
    """A0 and A1 as two KV heads, mean of the window rows, no pool."""
    return columns(golden_prefill(), Need("sum", rows=2), num_kv_heads=2) / 2


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (AdaKV(floor=0.2), [[2], [2, 3, 5]]),
        (AdaKV(floor=0.5), [[1, 2], [2, 5]]),  # 1.5 and 2.5: the tie goes to the lower head
        (AdaKV(floor=0.0), [[2], [2, 3, 5]]),
        (AdaKV(floor=1.0), [[1, 2], [2, 5]]),
        (AdaKV(floor=0.5, mode="safeguard"), [[2], [2, 3, 5]]),
        (AdaKV(floor=1.0, mode="safeguard"), [[1, 2], [2, 5]]),
        (AdaKV(skip=1), [[1, 2], [2, 5]]),
    ],
)
def test_golden(policy, kept):
    s0 = [0.0537, 0.1184, 0.1192, 0.0059, 0.1149, 0.0219]
    s1 = [0.0660, 0.0616, 0.2609, 0.2605, 0.0353, 0.2971]
    scores = golden_scores()
    torch.testing.assert_close(scores[0, :, :6], torch.tensor([s0, s1]), rtol=0, atol=6e-5)
    assert run(policy, scores, keep=4, recent=2) == [[[*head, 6, 7] for head in kept]]


def pooled_first(scores, free, total):
    """f_h in plain Python: the `total` best of a layer; newer first, then the lower head."""
    every = [(-scores[h][j], -j, h) for h in range(len(scores)) for j in free[h]]
    best = sorted(every)[:total]
    return [sum(1 for _, _, owner in best if owner == h) for h in range(len(scores))]


@given(
    heads=st.integers(1, 5),
    tokens=st.integers(2, 30),
    base=st.integers(0, 12),
    recent=st.integers(0, 4),
    floor=st.sampled_from([0.0, 0.2, 0.25, 0.5, 1 / 3, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_mix_is_the_formula_and_exact(heads, tokens, base, recent, floor, seed):
    keep = min(base + recent, tokens - 1)
    recent = min(recent, keep)
    if keep < 1:
        return
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 6, (1, heads, tokens), generator=generator) / 4  # with ties
    kept = run(AdaKV(floor=floor), scores, keep, recent)[0]
    free = [list(range(tokens - recent))] * heads
    base = keep - recent
    f = pooled_first(scores[0].tolist(), free, base * heads)
    targets = [(1 - exact(floor)) * n + exact(floor) * base for n in f]
    caps = largest_remainder([Fraction(t) for t in targets], base * heads)
    assert [len(head) - recent for head in kept] == caps
    for h, head in enumerate(kept):
        order = sorted(free[h], key=lambda j, h=h: (-scores[0, h, j].item(), -j))
        assert head == sorted([*order[: caps[h]], *range(tokens - recent, tokens)])


@given(
    heads=st.integers(1, 5),
    lengths=st.lists(st.integers(1, 30), min_size=5, max_size=5),
    keep=st.integers(1, 20),
    recent=st.integers(0, 4),
    floor=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    mode=st.sampled_from(["mix", "safeguard"]),
    normalise=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_totals_are_exact_however_much_the_heads_hold(
    heads, lengths, keep, recent, floor, mode, normalise, seed
):
    """A later turn: heads that hold different numbers of keys, some fewer than planned."""
    recent = min(recent, keep)
    held = torch.tensor([lengths[:heads]], dtype=torch.int32)
    tokens = int(held.max())
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(1, heads, tokens, generator=generator)
    scores[torch.rand(scores.shape, generator=generator) < 0.1] = -torch.inf
    scores[:, :, -1] = torch.nan
    policy = AdaKV(floor=floor, mode=mode, normalise=normalise)
    (kept,) = run(policy, scores, keep, recent, held)
    assert sum(map(len, kept)) == min(int(held.sum()), heads * keep)
    for head, n in zip(kept, lengths, strict=False):
        assert head == sorted(set(head)) and (not head or head[-1] < n)
        newest = list(range(max(n - recent, 0), n))
        assert head[len(head) - len(newest) :] == newest


def test_the_safeguard_is_a_minimum():
    scores = torch.stack([torch.rand(40) + 1, torch.rand(40) * 1e-3])[None]
    (kept,) = run(AdaKV(floor=0.25, mode="safeguard"), scores, keep=8, recent=0)
    assert [len(head) for head in kept] == [14, 2]
    (kept,) = run(AdaKV(floor=0.25), scores, keep=8, recent=0)
    assert [len(head) for head in kept] == [14, 2]
    (kept,) = run(AdaKV(floor=0.0), scores, keep=8, recent=0)
    assert [len(head) for head in kept] == [16, 0]


def test_normalise_lowers_heads_whose_mass_is_spread():
    flat, peaked = torch.full((40,), 0.5), torch.zeros(40)
    peaked[:6] = 0.45
    scores = torch.stack([flat, peaked])[None]
    counts = [
        [len(head) for head in run(AdaKV(floor=0.0, normalise=on), scores, 6, 0)[0]]
        for on in (False, True)
    ]
    assert counts == [[12, 0], [6, 6]]


def test_rows_are_independent():
    scores = torch.rand(3, 4, 20, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([[20] * 4, [11] * 4, [3] * 4], dtype=torch.int32)
    together = run(AdaKV(), scores, 6, 2, lengths)
    for row in range(3):
        n = int(lengths[row, 0])
        assert together[row] == run(AdaKV(), scores[row : row + 1, :, :n], 6, 2)[0]
    assert together[2] == [[0, 1, 2]] * 4


@given(total=st.integers(0, 60), available=st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_equal_shares(total, available):
    total = min(total, sum(available))
    (shares,) = equal_shares(torch.tensor([total]), torch.tensor([available])).tolist()
    assert sum(shares) == total
    assert all(0 <= share <= most for share, most in zip(shares, available, strict=True))
    limit = max(shares)
    # Who has less than the largest share has given all.
    assert all(
        share >= limit - 1 or share == most for share, most in zip(shares, available, strict=True)
    )


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 9))
def test_rounded_is_the_largest_remainder(numerators, denominator):
    numerators[0] += -sum(numerators) % denominator
    total = sum(numerators) // denominator
    expected = largest_remainder([Fraction(n, denominator) for n in numerators], total)
    assert rounded(torch.tensor([numerators]), denominator).tolist() == [expected]


def test_plan_is_the_scorers():
    assert AdaKV(Pyramid(window=2)).plan(shape(4), 20, 6) == Pyramid(window=2).plan(shape(4), 20, 6)
    assert AdaKV().needs(0, "prefill") == SnapKV().needs(0, "prefill")
    assert AdaKV.kvpress().scorer == SnapKV.kvpress()
    assert AdaKV.expected_attention().scorer.epsilon == 0.01
    assert AdaKV.readme().floor == 0.5


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"scorer": H2O()}, "whose decode steps evict"),
        ({"scorer": Streaming()}, "whose decode steps replace"),
        ({"scorer": LayerSplit()}, "whose decode steps replace"),
        ({"scorer": Full()}, "keeps everything"),
        ({"scorer": AdaKV()}, "in its own way"),
        ({"scorer": CriticalKV()}, "in its own way"),
        ({"scorer": Chunked()}, "in its own way"),
        ({"scorer": SnapKV}, "a policy object"),
        ({"scorer": Knorm(), "normalise": True}, "without negative scores"),
        ({"floor": 1.1}, "floor between"),
        ({"mode": "exact"}, "mode to be one of"),
        ({"skip": -1}, "skip to be an integer"),
    ],
)
def test_refusals(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        AdaKV(**arguments)
