"""ChunkKV: stretches of tokens, one set for all heads, budgets to the token."""

from __future__ import annotations

import pytest
import torch
from harness import golden_prefill, prefill, topk
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.policies import H2O, AdaKV, Chunked, Random, SnapKV, Stats


def select(policy, scores, keep, recent, positions=None, lengths=None):
    batch, heads, tokens = scores.shape
    if positions is None:
        positions = torch.arange(tokens, dtype=torch.int32).expand(batch, heads, -1)
    if lengths is None:
        lengths = torch.full((batch, heads), tokens, dtype=torch.int32)
    rank = torch.arange(tokens)
    protected = rank >= (lengths - recent)[..., None]
    stats = Stats(None, None, positions, lengths, torch.full((batch,), recent))
    chosen = policy.select(
        scores, torch.full_like(lengths, keep), protected,
        lambda s, k, p, n=None: topk(s, k, p, lengths if n is None else n),
        layer=0, stats=stats,
    )  # fmt: skip
    return [[[i for i in head if i >= 0] for head in row] for row in chosen.index.tolist()]


def plain(scores, chunk, keep, recent, positions):
    """One row in plain Python: scores [HK][S] lists over the same positions."""
    n = len(positions)
    safe = set(range(max(n - recent, 0), n))
    means = [sum(head[j] for head in scores) / len(scores) for j in range(n)]
    groups: dict[int, list[int]] = {}
    for j in range(n):
        if j not in safe:
            groups.setdefault(positions[j] // chunk, []).append(j)
    value = {c: sum(means[j] for j in own) / len(own) for c, own in groups.items()}
    order = [j for c in sorted(groups, key=lambda c: (-value[c], -c)) for j in groups[c][::-1]]
    return sorted(safe | set(order[: keep - len(safe)]))


def test_golden():
    # Group mean .1197 .1801 | .3801 .2664 | .1502 .3190 of the tokens before the window.
    row = prefill(Chunked(SnapKV(window=2, pool="none"), chunk=2), golden_prefill(), budget=4)
    assert row.kept() == [[2, 3, 6, 7]]
    row = prefill(Chunked(SnapKV(window=2, pool="none"), chunk=2), golden_prefill(), budget=5)
    assert row.kept() == [[2, 3, 5, 6, 7]]  # the newest token of the next best chunk


@given(
    tokens=st.integers(1, 40),
    chunk=st.integers(1, 12),
    keep=st.integers(1, 40),
    recent=st.integers(0, 8),
    seed=st.integers(0, 2**16),
)
def test_it_is_the_plain_rule(tokens, chunk, keep, recent, seed):
    generator = torch.Generator().manual_seed(seed)
    keep = min(keep, tokens)
    recent = min(recent, keep)
    # Eighths: sums are exact in any order, and chunks tie now and then.
    scores = torch.randint(0, 8, (1, 2, tokens), generator=generator) / 8
    positions = torch.randperm(3 * tokens, generator=generator)[:tokens].sort().values.int()
    expected = plain(scores[0].tolist(), chunk, keep, recent, positions.tolist())
    got = select(Chunked(chunk=chunk), scores, keep, recent, positions.expand(1, 2, -1))
    assert got == [[expected, expected]]


def test_rows_are_independent_and_padding_has_no_say():
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(2, 2, 24, generator=generator)
    lengths = torch.tensor([[15, 15], [24, 24]], dtype=torch.int32)
    scores[0, :, 15:] = torch.nan
    both = select(Chunked(chunk=5), scores, 9, 3, lengths=lengths)
    for row, n in enumerate((15, 24)):
        assert both[row] == select(Chunked(chunk=5), scores[row : row + 1, :, :n], 9, 3)[0]


def test_refusals_and_plan():
    with pytest.raises(ValueError, match="whose decode steps evict"):
        Chunked(H2O())
    with pytest.raises(ValueError, match="in its own way"):
        Chunked(AdaKV())
    with pytest.raises(ValueError, match="expected chunk to be an integer"):
        Chunked(chunk=0)
    assert Chunked().tensor_parallel == "refused"
    assert Chunked(Random(3)).scorer.seed == 3
