"""Page bounds: folded in by parts or at once they are min and max; U bounds every q.k it covers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged_problems import DEVICE, DTYPES, make, ragged_lens

from sparsekv.kernels import pages as ops

RUNS = ("triton", "reference")
LENS = ragged_lens(2, 2, [16, 32])


def op(name, run):
    return getattr(ops, f"{name}_{run}")


def bounds_of(k, table, lens, page_size):
    """{page: (min [D], max [D])} of logical slots k [B, HK, S, D], page by page."""
    found = {}
    for b, h in torch.cartesian_prod(torch.arange(len(lens)), torch.arange(lens.shape[1])).tolist():
        n = int(lens[b, h])
        for column, start in enumerate(range(0, n, page_size)):
            keys = k[b, h, start : min(n, start + page_size)]
            found[int(table[b, h, column])] = keys.amin(0), keys.amax(0)
    return found


def fresh(cache):
    """Bounds full of junk, as memory is."""
    shape = (cache.k_pages.shape[0], cache.k.shape[-1])
    return [torch.full(shape, fill, dtype=cache.k.dtype, device=DEVICE) for fill in (-77, 77)]


def filled(cache, run="reference", steps=1):
    """Bounds of a cache whose rows came in `steps` forwards of random widths, padded on the left.

    Every head of a row must hold as many slots.
    """
    page_min, page_max = fresh(cache)
    size, rows = cache.k_pages.shape[1], cache.lens[:, 0]
    shares = torch.linspace(0, 1, steps + 1).tolist()
    for low, high in pairwise(shares):
        start, end = ((rows * share).int() for share in (low, high))
        new = end - start
        width = max(1, int(new.max()))
        k = torch.full((*cache.lens.shape, width, cache.k.shape[-1]), torch.nan, device=DEVICE)
        k = k.to(cache.k.dtype)
        for b in range(len(rows)):
            count = int(new[b])
            k[b, :, width - count :] = cache.k[b, :, int(start[b]) : int(end[b])]
        seqlens = end[:, None].expand_as(cache.lens).contiguous()
        op("update_bounds", run)(k, page_min, page_max, cache.block_table, seqlens, new.int(), size)
    return page_min, page_max


def level(lens):
    """The heads of a row hold as many slots, as where nothing is evicted."""
    return tuple((row[0],) * len(row) for row in lens)


@pytest.mark.parametrize("run", RUNS)
@given(
    lens=LENS,
    steps=st.integers(1, 4),
    seed=st.integers(0, 99),
    size=st.sampled_from([16, 32]),
    dtype=st.sampled_from(DTYPES),
)
def test_bounds_are_min_and_max(run, lens, steps, seed, size, dtype):
    cache = make(seed, level(lens), P=size, dtype=dtype, D=24)
    page_min, page_max = filled(cache, run, steps)
    expected = bounds_of(cache.k, cache.block_table, cache.lens, size)
    untouched = torch.ones(len(page_min), dtype=torch.bool)
    for page, (low, high) in expected.items():
        assert torch.equal(page_min[page], low) and torch.equal(page_max[page], high)
        untouched[page] = False
    assert (page_min[untouched] == -77).all() and (page_max[untouched] == 77).all()


@pytest.mark.parametrize("run", RUNS)
@given(lens=LENS, seed=st.integers(0, 99), group=st.sampled_from([1, 3]), budget=st.integers(1, 90))
def test_scores_bound_every_key(run, lens, seed, group, budget):
    cache = make(seed, level(lens), dist="outliers")
    q = torch.randn(2, 2 * group, 16, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    limit = torch.tensor([budget, 7], dtype=torch.int32, device=DEVICE)
    bounds = filled(cache)
    args = (q, *bounds, cache.block_table, cache.lens, limit, 16)
    scores, pages, quota = op("page_scores", run)(*args)
    pinned, *counts = op("page_scores", run)(*args, pin_ends=True)
    assert torch.equal(pages, -(-cache.lens // 16)) and torch.equal(counts[0], pages)
    column = torch.arange(scores.shape[-1], device=DEVICE)
    held = column < pages[..., None]
    assert (scores[~held] == -torch.inf).all() and scores[held].isfinite().all()
    ends = held & ((column == 0) | (column == pages[..., None] - 1))
    assert torch.equal(pinned, torch.where(ends, torch.inf, scores))
    inside = cache.lens <= limit[:, None]
    assert torch.equal(quota, torch.where(inside, pages, (limit[:, None] // 16).clamp_min(2)))
    dots = torch.einsum("bhgd,bhsd->bhgs", q.unflatten(1, (2, -1)), cache.k.nan_to_num(0.0))
    slot = torch.arange(cache.k.shape[2], device=DEVICE)
    dots = dots.masked_fill((slot >= cache.lens[..., None])[:, :, None], -torch.inf)
    best = dots.amax(2).unflatten(-1, (-1, 16)).amax(-1)
    assert (best <= scores + 1e-4 * scores.abs().clamp(1, 1e9)).all()


def test_scores_of_the_worked_example():
    """Pages of 2 keys, a query of each of two heads: U of head 0, of head 1, of the group."""
    keys = torch.tensor(
        [[0, 0, 1, 2], [-2, -2, 2, 2], [-1, -1, 2, 0], [-1, 2, -1, 0], [1, 0, -2, -2],
         [2, 1, 2, 0], [2, -1, 0, 1], [-2, -1, -2, 0]], dtype=torch.float32, device=DEVICE,
    )  # fmt: skip
    q = torch.tensor([[-1, 2, 1, 2], [0, 1, 0, 2]], dtype=torch.float32, device=DEVICE)
    page_min, page_max = keys.view(4, 2, 4).aminmax(dim=1)
    table = torch.arange(4, dtype=torch.int32, device=DEVICE).expand(1, 1, -1)
    full = torch.full((1, 1), 8, dtype=torch.int32, device=DEVICE)
    pad = torch.nn.functional.pad
    for run in RUNS:
        expected = ([8, 7, 3, 2], [4, 2, 1, 1], [8, 7, 3, 2])
        for heads, scores in zip((q[:1], q[1:], q), expected, strict=True):
            wide = pad(heads, (0, 4))[None]  # a head dim that kernels accept
            found, _, quota = op("page_scores", run)(
                wide, pad(page_min, (0, 4)), pad(page_max, (0, 4)), table, full, full[0] // 2, 2
            )
            assert found[0, 0].tolist() == scores and quota.item() == 2


@pytest.mark.parametrize("run", RUNS)
@given(lens=LENS, seed=st.integers(0, 99), chosen=st.integers(1, 4))
def test_tables_of_chosen_pages(run, lens, seed, chosen):
    cache = make(seed, lens)
    pages = -(-cache.lens // 16)
    generator = torch.Generator().manual_seed(seed)
    index = torch.full((2, 2, chosen), -1, dtype=torch.int32)
    for b, h in torch.cartesian_prod(torch.arange(2), torch.arange(2)).tolist():
        in_use = int(pages[b, h])
        some = torch.randperm(max(in_use - 1, 0), generator=generator)[: chosen - 1].sort().values
        picked = [*some.tolist(), in_use - 1] if in_use else []
        index[b, h, : len(picked)] = torch.tensor(picked, dtype=torch.int32)
    count = (index >= 0).sum(-1).int()
    table, total = op("page_table", run)(
        index.to(DEVICE), count.to(DEVICE), pages, cache.block_table, cache.lens, 16
    )
    for b, h in torch.cartesian_prod(torch.arange(2), torch.arange(2)).tolist():
        columns = [c for c in index[b, h].tolist() if c >= 0]
        slots = sum(min(16, int(cache.lens[b, h]) - 16 * c) for c in columns)
        assert total[b, h] == slots
        expected = [int(cache.block_table[b, h, c]) for c in columns]
        assert table[b, h].tolist() == expected + [0] * (chosen - len(expected))


def test_what_does_not_fit_is_refused():
    cache = make(0, ((20, 20), (3, 3)))
    bounds, budget = filled(cache), torch.tensor([32, 32], dtype=torch.int32, device=DEVICE)
    q = torch.randn(2, 4, 16, device=DEVICE)
    rest = (cache.block_table, cache.lens)
    for wrong in (
        lambda: ops.page_scores(q[..., :8], *bounds, *rest, budget, 16),
        lambda: ops.page_scores(q[:, :3], *bounds, *rest, budget, 16),
        lambda: ops.page_scores(q, *bounds, *rest, budget.long(), 16),
        lambda: ops.page_scores(q.half(), *bounds, *rest, budget, 16),
        lambda: ops.update_bounds(cache.k, *bounds, *rest, budget[:1], 16),
        lambda: ops.page_table(rest[0].long(), rest[1], rest[1], *rest, 16),
    ):
        with pytest.raises(ValueError, match=r"expected .*, got "):
            wrong()
