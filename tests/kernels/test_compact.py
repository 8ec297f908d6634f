"""Compaction: exactly the kept records survive, in the first slots; programs run in any order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_problems import DEVICE, DTYPES, Paged, gather, lazy_zeros, make, ragged_lens, same
from torch import Tensor

from sparsekv.kernels.append import append_kv_reference, append_kv_triton
from sparsekv.kernels.compact import compact_kv, compact_kv_reference, compact_kv_triton
from sparsekv.kernels.decode import (
    paged_decode_attention_reference,
    paged_decode_attention_triton,
)

IMPLEMENTATIONS = {"reference": compact_kv_reference, "triton": compact_kv_triton}
both = pytest.mark.parametrize("run", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
CALLS = {
    "reference": (compact_kv_reference, append_kv_reference, paged_decode_attention_reference),
    "triton": (compact_kv_triton, append_kv_triton, paged_decode_attention_triton),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are tiny here; a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def records(pages: tuple[Tensor, ...], cache: Paged, b: int, h: int, slots: list[int]) -> set:
    """The (k, v, position, score) records of some slots of a head, as byte strings."""
    columns = []
    for x in pages:
        rows = gather(x, cache.block_table)[b, h].cpu().contiguous()
        columns.append([rows[s : s + 1].view(torch.uint8).numpy().tobytes() for s in slots])
    return set(zip(*columns, strict=True))


def check_compact(cache: Paged, keep: Tensor, run) -> Tensor:
    """Runs and checks the multiset of every head, the order, and that nothing else changed."""
    before, lens = cache.clone_pool(), cache.lens.clone()
    new = run(keep, *cache.pool, cache.block_table, cache.lens)
    assert new.dtype == torch.int32 and torch.equal(cache.lens, lens)
    slot = torch.arange(keep.shape[-1], device=DEVICE)
    kept = keep & (slot < lens[..., None])
    assert torch.equal(new, kept.sum(-1, dtype=torch.int32))
    P, changed = cache.k_pages.shape[1], torch.zeros(cache.scores.shape, dtype=torch.bool)
    for b, h in ((b, h) for b in range(lens.shape[0]) for h in range(lens.shape[1])):
        n, m = int(lens[b, h]), int(new[b, h])
        mask = kept[b, h, :n].cpu()
        chosen = records(before, cache, b, h, mask.nonzero().flatten().tolist())
        assert len(chosen) == m  # positions are distinct, so a set is a multiset
        assert records(cache.pool, cache, b, h, list(range(m))) == chosen
        for s in (~mask[:m]).nonzero().flatten().tolist():  # only the holes may be written
            changed[int(cache.block_table[b, h, s // P]), s % P] = True
    still = ~changed.to(DEVICE)
    for old, x in zip(before, cache.pool, strict=True):
        assert same(old[still], x[still])
    return new


@st.composite
def problems(draw):
    """(cache, keep): ragged heads, any fraction kept; keep is True at random beyond a length."""
    P = draw(st.sampled_from([16, 32, 64]))
    rows, heads = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]))
    seed = draw(st.integers(0, 2**31))
    cache = make(
        seed,
        draw(ragged_lens(rows, heads, [P, 2 * P])),
        D=draw(st.sampled_from([8, 16, 64, 80, 128])),
        P=P,
        dtype=draw(st.sampled_from(DTYPES)),
        spare=draw(st.integers(0, 2)),
    )
    gen = torch.Generator().manual_seed(seed)
    extra = draw(st.sampled_from([0, 1, 37]))  # S may exceed the table
    shape = (rows, heads, cache.k.shape[2] + extra)
    share = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    keep = torch.rand(shape, generator=gen) < share
    if draw(st.booleans()):  # the recent ones: the longest moves
        keep = torch.arange(shape[-1]) >= int(shape[-1] * (1 - share))
        keep = keep.expand(shape)
    return cache, keep.to(DEVICE)


@settings(max_examples=60)
@given(problems())
def test_reference_keeps_exactly_the_kept(problem) -> None:
    check_compact(*problem, compact_kv_reference)


@settings(max_examples=40)
@given(problems())
def test_kernel_keeps_exactly_the_kept(problem) -> None:
    check_compact(*problem, compact_kv_triton)


@settings(max_examples=15)
@given(problems())
def test_kernel_equals_reference_bitwise(problem) -> None:
    cache, keep = problem
    pools = cache.clone_pool(), cache.clone_pool()
    arguments = cache.block_table, cache.lens
    a = compact_kv_reference(keep, *pools[0], *arguments)
    b = compact_kv_triton(keep, *pools[1], *arguments)
    assert torch.equal(a, b)
    assert all(same(x, y) for x, y in zip(*pools, strict=True))


@both
def test_idempotent(run) -> None:
    """Keeping everything that is left moves nothing."""
    cache = make(0, ((40, 1, 0), (16, 17, 33)))
    keep = torch.rand(cache.k.shape[:3], device=DEVICE) < 0.5
    cache.lens = check_compact(cache, keep, run)
    before = cache.clone_pool()
    again = run(torch.ones_like(keep), *cache.pool, cache.block_table, cache.lens)
    assert torch.equal(again, cache.lens)
    assert all(same(a, b) for a, b in zip(before, cache.pool, strict=True))


@both
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_or_nothing(run, share: float) -> None:
    """Evicting all leaves length 0, keeping all moves nothing; both touch no record."""
    cache = make(0, ((40, 1, 0),))
    before = cache.clone_pool()
    keep = torch.full(cache.k.shape[:3], bool(share), device=DEVICE)
    new = run(keep, *cache.pool, cache.block_table, cache.lens)
    assert torch.equal(new, cache.lens * int(share))
    assert all(same(a, b) for a, b in zip(before, cache.pool, strict=True))


@both
def test_more_than_one_ranking_step(run) -> None:
    """2500 slots: running counts cross the 1024-slot steps of the kernel."""
    cache = make(0, ((2500, 1023),), D=8, P=64)
    keep = torch.rand(cache.k.shape[:3], generator=torch.Generator().manual_seed(0)) < 0.4
    check_compact(cache, keep.to(DEVICE), run)


@both
def test_strided_keep(run) -> None:
    """keep as a slice of a wider mask, and transposed."""
    cache = make(0, ((40, 20), (33, 16)))
    wide = torch.rand(2, 2, 100, device=DEVICE) < 0.5
    keep = wide[..., 10 : 10 + cache.k.shape[2]]
    pools = [cache.clone_pool() for _ in range(3)]
    masks = (keep.contiguous(), keep, keep.transpose(0, 2).contiguous().transpose(0, 2))
    for pool, mask in zip(pools, masks, strict=True):
        run(mask, *pool, cache.block_table, cache.lens)
    for pool in pools[1:]:
        assert all(same(a, b) for a, b in zip(pools[0], pool, strict=True))


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("page_size", [16, 32])
def test_b77_page_boundary(calls, page_size: int) -> None:
    """Kept = page-1, page, page+1: decode equals dense ragged attention; append follows up."""
    compact, append, decode = calls
    lens = ((3 * page_size, 2 * page_size + 5, 3 * page_size - 1),)
    kept = (page_size - 1, page_size, page_size + 1)
    cache = make(0, lens, P=page_size)
    S = cache.k.shape[2]
    gen = torch.Generator().manual_seed(1)
    keep = torch.zeros(1, 3, S, dtype=torch.bool)
    for h, count in enumerate(kept):
        keep[0, h, torch.randperm(lens[0][h], generator=gen)[:count]] = True
    new = compact(keep.to(DEVICE), *cache.pool, cache.block_table, cache.lens)
    assert new.tolist() == [list(kept)]

    k, v = torch.randn(2, 1, 3, 1, 16, generator=gen).to(DEVICE)
    time = torch.full((1, 3, 1), 999, dtype=torch.int32, device=DEVICE)
    append(k, v, *cache.pool, cache.block_table, new[..., None].contiguous(), time)
    q = torch.randn(1, 6, 16, generator=gen).to(DEVICE)
    out, lse, _ = decode(
        q, *cache.pool[:2], cache.block_table, new + 1, softmax_scale=0.25, chunk_size=32
    )
    for h, count in enumerate(kept):
        dense_k = torch.cat([cache.k[0, h][keep[0, h]], k[0, h]]).double()
        dense_v = torch.cat([cache.v[0, h][keep[0, h]], v[0, h]]).double()
        x = q[0, 2 * h : 2 * h + 2].double() @ dense_k.T * 0.25
        assert torch.allclose(
            out[0, 2 * h : 2 * h + 2].double(), x.softmax(-1) @ dense_v, rtol=0, atol=1e-5
        )
        assert torch.allclose(lse[0, 2 * h : 2 * h + 2].double(), x.logsumexp(-1), atol=1e-5)
        page, offset = cache.block_table[0, h, count // page_size], count % page_size
        assert int(cache.positions[int(page), offset]) == 999
        assert int((cache.positions == 999).sum()) == 3


@both
@pytest.mark.parametrize("order", [[1, 2], [2, 1]], ids=["from the far page", "to the far page"])
def test_b76_offsets_beyond_int32(run, order: list[int]) -> None:
    """Pages 2^30 elements apart: page 2 starts past 2^31. Untouched memory costs nothing."""
    caches = (make(0, ((30,),), dtype=torch.float16, spare=0, page_seed=s) for s in range(99))
    cache = next(c for c in caches if c.block_table.flatten().tolist() == order)
    stride = 1 << 30
    far = []
    for pages in cache.pool[:2]:
        far.append(lazy_zeros(2 * stride + 256).as_strided((3, 16, 16), (stride, 16, 1)))
        far[-1].copy_(pages)
    near, rest = cache.clone_pool(), [cache.positions.clone(), cache.scores.clone()]
    keep = (torch.arange(32, device=DEVICE) % 2 == 0).view(1, 1, 32)
    want = run(keep, *near, cache.block_table, cache.lens)
    got = run(keep, *far, *rest, cache.block_table, cache.lens)
    assert torch.equal(got, want)
    assert all(same(a, b) for a, b in zip((*far, *rest), near, strict=True))


BAD = {
    "keep dtype": {"keep": torch.zeros(1, 2, 16, dtype=torch.uint8)},
    "keep shape": {"keep": torch.zeros(2, 2, 16, dtype=torch.bool)},
    "table": {"block_table": torch.zeros(1, 1, 1, dtype=torch.int32)},
    "lengths dtype": {"cache_seqlens": torch.zeros(1, 2, dtype=torch.int64)},
    "v_pages": {"v_pages": torch.zeros(3, 16, 8)},
    "strided scores": {"scores": torch.zeros(16, 3).T},
}


@both
@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_bad_arguments_are_refused(run, change: dict) -> None:
    arguments = {
        "keep": torch.zeros(1, 2, 16, dtype=torch.bool),
        "k_pages": torch.zeros(3, 16, 16),
        "v_pages": torch.zeros(3, 16, 16),
        "positions": torch.zeros(3, 16, dtype=torch.int32),
        "scores": torch.zeros(3, 16),
        "block_table": torch.zeros(1, 2, 1, dtype=torch.int32),
        "cache_seqlens": torch.zeros(1, 2, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match="expected"):
        run(**(arguments | change))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_gpu_repeats_bitwise(dtype: torch.dtype, head_dim: int) -> None:
    cache = make(0, ((1000, 3, 0), (1025, 4000, 64)), D=head_dim, dtype=dtype)
    keep = torch.rand(cache.k.shape[:3], device=DEVICE) < 0.4
    want = cache.clone_pool()
    lens = compact_kv_reference(keep, *want, cache.block_table, cache.lens)
    for _ in range(20):
        got = cache.clone_pool()
        assert torch.equal(compact_kv(keep, *got, cache.block_table, cache.lens), lens)
        assert all(same(a, b) for a, b in zip(got, want, strict=True))
