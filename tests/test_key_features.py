"""Features of keys and values against their formulas in float64, and the memory they take."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import sparsekv.features as features
from sparsekv.features import Source, compute
from sparsekv.headwise import Keys, Queries, Scores
from sparsekv.moments import PromptMoments, query_moments
from sparsekv.policies.features import (
    ExpectedProbability,
    Feature,
    GroupMaxWindow,
    KeyAnchor,
    KeyNorm,
    KeySimilarity,
    ProjectedValueNorm,
    ValueNorm,
)
from sparsekv.rope import Rotary, rotate_half

ALL = [
    KeyNorm(),
    KeyAnchor(),
    ValueNorm(),
    ExpectedProbability(sinks=2, future=8),
    ExpectedProbability(sinks=0, future=3, covariance=False),
    GroupMaxWindow(rows=3),
    ProjectedValueNorm(),
    KeySimilarity(0.5),
]
INV_FREQ = torch.tensor([1.0, 0.3, 0.05])  # of 8 dims, 6 are turned


def rope(x, positions):
    """Rotate-half RoPE by a dense matrix, float64 [..., D] at positions [...]."""
    half, dim = len(INV_FREQ), x.shape[-1]
    angle = positions.double()[..., None] * INV_FREQ.double()
    matrix = torch.eye(dim, dtype=torch.float64).expand(*positions.shape, dim, dim).clone()
    for i in range(half):
        cos, sin = angle[..., i].cos(), angle[..., i].sin()
        matrix[..., i, i] = matrix[..., half + i, half + i] = cos
        matrix[..., i, half + i], matrix[..., half + i, i] = -sin, sin
    return (matrix @ x[..., None])[..., 0]


class Problem:
    """Rows of a prompt of different lengths, left-padded; what is padding holds NaN."""

    def __init__(self, lengths, heads=2, group=3, dim=8, seed=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        self.lengths, tokens, batch = lengths, max(lengths), len(lengths)
        self.pads = np.array([tokens - n for n in lengths])
        kinds = ((heads, 1.5), (heads, 1.0), (heads * group, 1.0))
        self.k, self.v, self.before = (
            scale * torch.randn(batch, n, tokens, dim, generator=generator) + 0.5
            for n, scale in kinds
        )
        pads = torch.tensor(self.pads)
        position = torch.arange(tokens) - pads[:, None]
        self.positions = torch.where(position < 0, -1, position).int()
        at = self.positions[:, None].expand(-1, heads * group, -1)
        self.q = rope(self.before.double(), at).to(dtype)
        self.k, self.v = self.k.to(dtype), self.v.to(dtype)
        for row, pad in enumerate(self.pads):
            self.k[row, :, :pad], self.v[row, :, :pad] = torch.nan, torch.nan
        self.held = torch.tensor(lengths, dtype=torch.int32)
        self.w_o = torch.randn(12, heads * group * dim, generator=generator).to(dtype)
        self.scores, self.rotary = Scores(0.4), Rotary(INV_FREQ)

    def source(self, scores=None):
        heads = self.k.shape[1]
        at = self.positions[:, None].expand(-1, heads, -1)
        keys = Keys(self.k, self.v, at, self.held[:, None].expand(-1, heads))
        queries = Queries(self.q, self.positions, self.held)

        def last(rows):
            return Queries(
                self.q[:, :, -rows:], self.positions[:, -rows:], self.held.clamp_max(rows)
            )

        moments = PromptMoments(queries, self.held, {}, self.rotary)
        scores = scores or self.scores
        return Source(keys, self.pads, scores, last, moments.ahead, lambda: self.w_o)

    def expected(self, feature, row, head):
        """The formula for one head, float64 [n]."""
        n, pad = self.lengths[row], self.pads[row]
        k, v = (x[row, head, pad:].double() for x in (self.k, self.v))
        group = self.q.shape[1] // self.k.shape[1]
        own = slice(head * group, (head + 1) * group)
        if isinstance(feature, KeyNorm):
            return k.norm(dim=-1)
        if isinstance(feature, ValueNorm):
            return v.norm(dim=-1)
        if isinstance(feature, KeyAnchor):
            anchor = (k / k.norm(dim=-1, keepdim=True)).mean(0)
            return torch.cosine_similarity(k, anchor[None], dim=-1)
        if isinstance(feature, ProjectedValueNorm):
            blocks = self.w_o.double().unflatten(1, (-1, k.shape[-1]))[:, own]  # [D_model, G, D]
            return torch.einsum("jd,mgd->gjm", v, blocks).abs().sum(-1).mean(0)
        if isinstance(feature, KeySimilarity):
            return redundancy(k, feature.threshold)
        c = self.scores.softmax_scale
        if isinstance(feature, GroupMaxWindow):
            rows, out = min(feature.rows, n), torch.zeros(n, dtype=torch.float64)
            if n > feature.rows:
                q = self.q[row, own, -rows:].double()
                x = (c * q @ k[: n - feature.rows].T).amax(0)
                out[: n - feature.rows] = x.softmax(-1).mean(0)
            return out
        return self.expected_probability(feature, row, own, k, n)

    def expected_probability(self, feature, row, own, k, n):
        out, c = torch.zeros(n, dtype=torch.float64), self.scores.softmax_scale
        if n <= feature.sinks:
            return out
        at = n + torch.arange(feature.future)
        eye = torch.eye(k.shape[-1], dtype=torch.float64).expand(feature.future, -1, -1)
        turn = rope(eye, at[:, None].expand(-1, k.shape[-1])).mean(0).T  # R, its columns turned
        for q in self.before[row, own, int(self.pads[row]) + feature.sinks :].double():
            mu, sigma = turn @ q.mean(0), turn @ q.T.cov(correction=0) @ turn.T
            z = c * k @ mu
            if feature.covariance:
                z += c * c / 2 * torch.einsum("jd,de,je->j", k, sigma, k)
            out[feature.sinks :] += z[feature.sinks :].softmax(-1) / len(range(*own.indices(99)))
        return out


def redundancy(k, threshold):
    """R_j: n x n cosines, the diagonal and each key's last near duplicate taken out."""
    unit = k / k.norm(dim=-1, keepdim=True)
    cos = (unit @ unit.T).fill_diagonal_(0.0)
    for row in cos:
        near = (row > threshold).nonzero()
        if len(near):
            row[near[-1]] = 0.0
    return cos.mean(0).softmax(-1)


def check(problem, feature, atol=2e-6, rtol=2e-5):
    got = compute(feature, problem.source())
    assert got.dtype == torch.float32
    assert got.shape == problem.k.shape[:3]
    for row, n in enumerate(problem.lengths):
        for head in range(got.shape[1]):
            expected = problem.expected(feature, row, head)
            torch.testing.assert_close(got[row, head, :n].double(), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("feature", ALL, ids=repr)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=3),
    group=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_formula(feature, lengths, group, seed):
    check(Problem(lengths, group=group, seed=seed), feature)


@pytest.mark.parametrize("feature", ALL, ids=repr)
def test_tiles_add_up(feature, monkeypatch):
    """Tiles of 5 keys and queries."""
    monkeypatch.setattr("sparsekv.features._TILE", 5 * 2 * 2 * 8)
    monkeypatch.setattr("sparsekv.moments._TILE", 5 * 2 * 6 * 8)
    check(Problem([33, 17]), feature)


@pytest.mark.parametrize("feature", ALL, ids=repr)
def test_inputs_are_left_alone(feature):
    problem = Problem([12])
    before = [x.clone() for x in (problem.k, problem.v, problem.q)]
    compute(feature, problem.source())
    for old, new in zip(before, (problem.k, problem.v, problem.q), strict=True):
        assert torch.equal(old, new)


def test_softcap_bends_the_logits_of_the_window():
    problem, feature = Problem([20]), GroupMaxWindow(rows=2)
    got = compute(feature, problem.source(Scores(0.4, softcap=2.0)))[0, 0]
    q, k = problem.q[0, :3, -2:].double(), problem.k[0, 0, :18].double()
    x = 2 * torch.tanh(0.4 * q @ k.T / 2)
    torch.testing.assert_close(got[:18].double(), x.amax(0).softmax(-1).mean(0), atol=1e-6, rtol=0)


def test_an_unknown_feature_is_refused():
    with pytest.raises(ValueError, match="expected a feature of KeyNorm"):
        compute(Feature(), Problem([4]).source())


def test_moments_of_parts_are_the_moments_of_all():
    problem = Problem([40, 23])
    whole = query_moments(
        Queries(problem.q, problem.positions, problem.held), 4, problem.rotary, True
    )
    parts = None
    for at in (slice(0, 9), slice(9, 18), slice(18, 40)):
        part = Queries(problem.q[:, :, at], problem.positions[:, at], problem.held)
        new = query_moments(part, 4, problem.rotary, True)
        parts = new if parts is None else parts.merge(new)
    for name in ("count", "mean", "scatter"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), atol=1e-5, rtol=1e-5)
    assert whole.count.tolist() == [36, 19]
    q = problem.before[1, 2, 17 + 4 :].double()
    torch.testing.assert_close(whole.mean[1, 2].double(), q.mean(0), atol=1e-6, rtol=1e-5)
    cov = q.T.cov(correction=0) * 19
    torch.testing.assert_close(whole.scatter[1, 2].double(), cov, atol=1e-4, rtol=1e-5)


def test_a_large_mean_does_not_drown_the_covariance():
    problem = Problem([64])
    problem.before += 300.0
    at = problem.positions[:, None].expand(-1, 6, -1)
    problem.q = rope(problem.before.double(), at).float()
    got = query_moments(
        Queries(problem.q, problem.positions, problem.held), 0, problem.rotary, True
    )
    expected = problem.before[0, 1].double().T.cov(correction=0) * 64
    torch.testing.assert_close(got.scatter[0, 1].double(), expected, atol=0.02, rtol=1e-3)


def test_rotation_there_and_back():
    x, positions = torch.randn(2, 3, 5, 8), torch.randint(0, 999, (2, 1, 5))
    rotary = Rotary(INV_FREQ)
    turned = rotary.turn(x, positions)
    expected = rope(x.double(), positions.expand(2, 3, 5))
    torch.testing.assert_close(turned.double(), expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(rotary.turn(turned, -positions), x, atol=1e-5, rtol=0)
    assert torch.equal(turned[..., 6:], x[..., 6:])
    cos, sin = rotary.mean(torch.tensor([3, 4]), 2)  # of positions 3 and 4, of 4 and 5
    mean = (rotary.turn(x[1], torch.tensor(4)) + rotary.turn(x[1], torch.tensor(5))) / 2
    torch.testing.assert_close(rotate_half(x[1], cos[1], sin[1]), mean, atol=1e-5, rtol=0)
    assert rotate_half(x.bfloat16(), cos[0], sin[0]).dtype == torch.float32


def peak_bytes(run):
    """Most bytes that exist at a time beyond those before `run`, by the allocator's own record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    now = most = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


# The other two are kernels, whose CPU references take what they like.
@pytest.mark.parametrize("feature", [*ALL[:-2], GroupMaxWindow(rows=32)], ids=repr)
def test_128k_tokens_of_an_8b_layer_take_less_than_64_mb(feature):
    """8 KV heads of 4 query heads, D = 128, in two rows. Measured at two lengths of several tiles:
    what is taken is a constant and so many bytes a token, so the line through them reaches 131072.
    Moments and scores are measured each by itself, for the larger of two lines is no line.
    """

    def measured(tokens):
        tokens //= 2  # a row, laid out as models make them
        k = torch.randn(2, tokens, 8, 128).bfloat16().transpose(1, 2)
        q = torch.randn(2, tokens, 32, 128).bfloat16().transpose(1, 2)
        position = torch.arange(tokens, dtype=torch.int32).expand(2, -1)
        held = torch.tensor([tokens] * 2, dtype=torch.int32)
        rotary = Rotary(10000.0 ** (-torch.arange(64) / 64))
        moments = PromptMoments(Queries(q, position, held), held, {}, rotary)
        source = Source(
            Keys(k, k, position[:, None].expand(-1, 8, -1), held[:, None].expand(-1, 8)),
            np.zeros(2, dtype=int), Scores(128**-0.5),
            lambda rows: Queries(q[:, :, -rows:], position[:, -rows:], held.clamp_max(rows)),
            moments.ahead, lambda: torch.empty(0),
        )  # fmt: skip
        asks_moments = isinstance(feature, ExpectedProbability)
        return np.array(
            [
                peak_bytes(lambda: moments.of(feature)) if asks_moments else 0,
                peak_bytes(lambda: compute(feature, source)),
            ]
        )

    tile = features._TILE // (8 * 128)
    small, large = measured(2 * tile), measured(4 * tile)
    slope = np.maximum(large - small, 0) / (2 * tile)
    at_128k = small + slope * (131072 - 2 * tile)
    assert (at_128k < 64e6).all(), (small, large, at_128k)
    assert large[1] > features._TILE * 4  # the record is no empty one
