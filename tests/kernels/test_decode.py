"""Paged decode: reference and kernel against an explicit float64 loop over heads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from decode_oracle import (
    arguments,
    assert_close,
    assert_probs,
    merge,
    oracle,
    queries,
    reduce_group,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_problems import DEVICE, DTYPES, Lens, lazy_zeros, make, ragged_lens, same

from sparsekv.kernels._decode_plan import default_chunk_size
from sparsekv.kernels.decode import (
    paged_decode_attention_reference,
    paged_decode_attention_triton,
)
from sparsekv.kernels.prefill import prefill_attention


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are tiny here; a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


IMPLEMENTATIONS = {
    "reference": paged_decode_attention_reference,
    "triton": paged_decode_attention_triton,
}
both = pytest.mark.parametrize("run", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
LENS: Lens = ((0, 1, 33), (48, 47, 16))  # empty, one slot, page edges


@st.composite
def problems(draw):
    """(cache, q, options) with every feature switched on at random."""
    P = draw(st.sampled_from([16, 32, 64]))
    chunk = draw(st.sampled_from([32, 64, 128, None]))
    rows, heads = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]))
    group = draw(st.sampled_from([1, 2, 3, 4, 7, 8]))
    seed = draw(st.integers(0, 2**31))
    dist = draw(st.sampled_from(["normal", "outliers", "equal", "zeros", "hot"]))
    cache = make(
        seed,
        draw(ragged_lens(rows, heads, [P, 2 * P, chunk or 128])),
        D=draw(st.sampled_from([16, 64, 80, 96, 128])),
        P=P,
        dtype=draw(st.sampled_from(DTYPES)),
        dist=dist,
        spare=draw(st.integers(0, 2)),
    )
    q = queries(seed, cache, group)
    options = {"softmax_scale": draw(st.sampled_from([1.0, 0.5, 4.0])) * q.shape[-1] ** -0.5}
    options["softcap"] = draw(st.sampled_from([None, 5.0, 30.0]))
    sink = draw(st.sampled_from([None, 0.0, 3.0, 40.0, -40.0]))
    if sink is not None:
        options["sinks"] = torch.full((q.shape[1],), sink) + torch.arange(q.shape[1])
        options["sinks"] = options["sinks"].to(DEVICE)
    options["window"] = draw(st.sampled_from([None, 1, 2, 17, 10_000]))
    if options["window"] is not None:
        options["q_positions"] = torch.randint(40, 120, (rows,), dtype=torch.int32, device=DEVICE)
    return cache, q, options, chunk, draw(st.sampled_from([None, "none", "mean", "max", "sum"]))


def check_against_oracle(run, problem) -> None:
    cache, q, options, chunk, probs = problem
    extra = {"positions": cache.positions, "probs": probs, "chunk_size": chunk}
    got = run(*arguments(q, cache), **options, **extra)
    want = oracle(q, cache, **options)
    assert got[0].dtype == q.dtype and got[1].dtype == torch.float32
    assert_close(got, want, q.dtype)
    if probs is None:
        assert got[2] is None
    else:
        assert_probs(got[2], reduce_group(want[2], probs, cache.k.shape[1]))


@settings(max_examples=60)
@given(problems())
def test_reference_equals_float64(problem) -> None:
    check_against_oracle(paged_decode_attention_reference, problem)


@settings(max_examples=25)
@given(problems())
def test_kernel_equals_float64(problem) -> None:
    check_against_oracle(paged_decode_attention_triton, problem)


@pytest.mark.parametrize("page_size", [1, 3])
def test_reference_takes_any_page_size(page_size: int) -> None:
    cache = make(0, LENS, P=page_size)
    q = queries(0, cache, 2)
    got = paged_decode_attention_reference(*arguments(q, cache), softmax_scale=0.25)
    assert_close(got, oracle(q, cache, softmax_scale=0.25), torch.float32)


def test_reference_keeps_float64() -> None:
    cache = make(0, LENS, dtype=torch.float64)
    q = queries(0, cache, 2)
    out, lse, _ = paged_decode_attention_reference(*arguments(q, cache), softmax_scale=0.25)
    want = oracle(q, cache, softmax_scale=0.25)
    assert (out.cpu() - want[0]).abs().max() < 1e-14
    assert torch.allclose(lse.cpu(), want[1], rtol=0, atol=1e-14)


@pytest.mark.parametrize("dist, scale", [("normal", 15.0), ("hot", 4.0), ("outliers", 15.0)])
def test_large_logits(dist: str, scale: float) -> None:
    """Logits of +-60 and more: the running maximum must rescale, nothing may overflow."""
    cache = make(3, LENS, D=64, dist=dist)
    q = queries(3, cache, 2)
    want = oracle(q, cache, softmax_scale=scale / 8)
    assert want[3] > 30
    got = paged_decode_attention_triton(
        *arguments(q, cache), softmax_scale=scale / 8, chunk_size=32, probs="none"
    )
    assert_close(got, want, torch.float32)
    assert_probs(got[2], want[2])


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_page_numbers_do_not_matter(run, dtype: torch.dtype) -> None:
    """Bitwise: the same slots in other pages."""
    results = []
    for page_seed in (1, 2):
        cache = make(0, LENS, dtype=dtype, page_seed=page_seed, spare=3)
        q = queries(0, cache, 2)
        results.append(run(*arguments(q, cache), softmax_scale=0.25, probs="none", chunk_size=32))
    assert not torch.equal(make(0, LENS, page_seed=1).block_table, cache.block_table)
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@both
def test_garbage_never_leaks(run) -> None:
    """Unused slots and pages, the null page and unused table entries: NaN or huge, same bits."""
    cache = make(0, LENS, spare=2)
    q = queries(0, cache, 2)
    window = {"window": 30, "q_positions": torch.full((2,), 45, dtype=torch.int32, device=DEVICE)}
    results = []
    for fill, filler in ((torch.nan, 0), (3e38, -(1 << 20))):
        for pages in (cache.k_pages, cache.v_pages):
            pages.copy_(torch.where(pages.isnan() | (pages > 1e38), fill, pages))
        positions = torch.where(cache.positions > 1000, filler, cache.positions)
        options = {"positions": positions, "softmax_scale": 0.25, "probs": "mean"}
        results.append(run(*arguments(q, cache), chunk_size=32, **options, **window))
    assert all(bool(torch.isfinite(x).all()) for x in (results[0][0], results[0][2]))
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunk_size_does_not_matter(dtype: torch.dtype) -> None:
    cache = make(0, ((100, 97), (0, 129)), D=64, dtype=dtype)
    q = queries(0, cache, 4)
    runs = [
        paged_decode_attention_triton(*arguments(q, cache), softmax_scale=0.125, chunk_size=chunk)
        for chunk in (16, 32, 64, 256)
    ]
    for out, lse, _ in runs[1:]:
        limit = 2e-6 if dtype == torch.float32 else 2e-3 if dtype == torch.float16 else 2e-2
        assert (out - runs[0][0]).abs().max() <= limit
        full = runs[0][1] > -torch.inf
        assert (lse - runs[0][1])[full].abs().max() <= 2e-6


@both
def test_slot_order_does_not_matter(run) -> None:
    """Permuting the records of every head keeps out and lse and permutes the probabilities."""
    cache = make(0, ((40, 7, 16), (1, 0, 33)))
    q = queries(0, cache, 2)
    options = {"softmax_scale": 0.25, "window": 20, "probs": "none", "chunk_size": 32}
    options["q_positions"] = torch.full((2,), 45, dtype=torch.int32, device=DEVICE)
    before = run(*arguments(q, cache), positions=cache.positions, **options)
    order = torch.arange(cache.k.shape[2]).repeat(2, 3, 1)
    for b, h in ((b, h) for b in range(2) for h in range(3)):
        n = int(cache.lens[b, h])
        order[b, h, :n] = torch.randperm(n, generator=torch.Generator().manual_seed(b))
    order = order.to(DEVICE)
    for pages, dense in ((cache.k_pages, cache.k), (cache.v_pages, cache.v)):
        moved = dense.gather(2, order[..., None].expand_as(dense))
        pages[cache.block_table.long()] = moved.unflatten(2, (-1, 16))
    cache.positions[cache.block_table.long()] = cache.pos.gather(2, order).unflatten(2, (-1, 16))
    after = run(*arguments(q, cache), positions=cache.positions, **options)
    assert torch.allclose(before[0], after[0], rtol=0, atol=2e-6)
    assert torch.allclose(before[1], after[1], rtol=0, atol=2e-6)
    expected = before[2].gather(2, order.repeat_interleave(2, 1))
    assert torch.allclose(expected, after[2], rtol=1e-3, atol=1e-6)


@both
def test_equals_prefill_of_one_query(run) -> None:
    """One implementation of softcap, window and sinks for both kernels: equal lengths, T = 1."""
    cache = make(0, ((37, 37), (37, 37)), D=64)
    q = queries(0, cache, 3)
    shared = {"softmax_scale": 0.125, "softcap": 8.0, "window": 9, "sinks": torch.arange(6.0) - 2}
    shared["sinks"] = shared["sinks"].to(DEVICE)
    q_positions = torch.full((2,), 63, dtype=torch.int32, device=DEVICE)  # no key is newer
    got = run(*arguments(q, cache), positions=cache.positions, q_positions=q_positions, **shared)
    k, v = (x[:, :, :37].transpose(1, 2).flatten(0, 1) for x in (cache.k, cache.v))  # [B*37,HK,D]
    for h in range(2):  # positions differ per KV head; prefill has one per token
        heads = slice(3 * h, 3 * h + 3)
        out, lse = prefill_attention(
            q[:, heads],
            k[:, h : h + 1],
            v[:, h : h + 1],
            torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE),
            torch.tensor([0, 37, 74], dtype=torch.int32, device=DEVICE),
            1,
            37,
            **(shared | {"sinks": shared["sinks"][heads]}),
            positions_q=q_positions,
            positions_k=cache.pos[:, h, :37].flatten().contiguous(),
        )
        seen = torch.isfinite(got[1][:, heads])
        assert torch.allclose(got[0][:, heads][seen], out[seen], rtol=0, atol=1e-5)
        assert torch.allclose(got[1][:, heads][seen], lse.T[seen], rtol=0, atol=1e-5)


@both
@pytest.mark.parametrize("chunk", [32, 128])
def test_mass_is_one_minus_the_sink(run, chunk: int) -> None:
    cache = make(0, LENS, D=64, dist="outliers")
    q = queries(0, cache, 4)
    sinks = torch.linspace(-3, 6, q.shape[1], device=DEVICE)
    _, lse, p = run(
        *arguments(q, cache), softmax_scale=0.125, sinks=sinks, probs="none", chunk_size=chunk
    )
    mass = 1 - torch.exp(sinks - lse)
    assert torch.allclose(p.sum(-1), torch.where(lse > -torch.inf, mass, 0), rtol=0, atol=5e-4)
    assert (p >= 0).all()


@both
@pytest.mark.parametrize("sink", [None, 2.0])
@pytest.mark.parametrize("chunk", [32, 128])
def test_b74_empty_head(run, sink: float | None, chunk: int) -> None:
    """A head with zero slots: out 0, lse -inf, probabilities 0; it merges as a neutral element."""
    cache = make(0, ((0, 45), (0, 0)))
    q = queries(0, cache, 2)
    sinks = None if sink is None else torch.full((4,), sink, device=DEVICE)
    options = {"softmax_scale": 0.25, "probs": "none", "sinks": sinks, "chunk_size": chunk}
    out, lse, p = run(*arguments(q, cache), **options)
    empty = torch.tensor([[True, True, False, False], [True] * 4], device=DEVICE)
    assert torch.equal(lse == -torch.inf, empty)
    assert (out[empty] == 0).all() and (p[empty] == 0).all()
    assert torch.isfinite(out).all() and torch.isfinite(p).all()
    merged = merge([out, torch.zeros_like(out)], [lse, torch.full_like(lse, -torch.inf)])
    assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)


@both
def test_b75_any_partition_merges_to_the_whole(run) -> None:
    """Pages of every head dealt to three caches, one of them with empty heads."""
    P, whole = 16, make(0, ((64, 16), (48, 33)), D=64)
    q = queries(0, whole, 2)
    want = run(*arguments(q, whole), softmax_scale=0.125, chunk_size=32)
    parts = []
    for cut, stop in ((0, 2), (2, 3), (3, 5)):
        table = whole.block_table[:, :, cut:stop].contiguous()
        lens = (whole.lens - cut * P).clamp(0, (stop - cut) * P).int()
        pages = whole.k_pages, whole.v_pages
        parts.append(run(q, *pages, table, lens, softmax_scale=0.125, chunk_size=16)[:2])
    out, lse = merge([part[0] for part in parts], [part[1] for part in parts])
    assert any((part[1] == -torch.inf).any() for part in parts)
    assert torch.allclose(out, want[0], rtol=0, atol=1e-6)
    assert torch.allclose(lse, want[1], rtol=1e-6, atol=1e-6)


@both
def test_b76_offsets_beyond_int32(run) -> None:
    """Pages 2^30 elements apart: page 2 starts past 2^31. Untouched memory costs nothing."""
    small = make(0, ((20,),), dtype=torch.float16, spare=0)
    stride = 1 << 30
    pool = []
    for pages in (small.k_pages, small.v_pages):
        far = lazy_zeros(2 * stride + pages[0].numel()).as_strided((3, 16, 16), (stride, 16, 1))
        far.copy_(pages)
        pool.append(far)
    assert small.block_table.max() == 2
    q = queries(0, small, 2)
    want = run(*arguments(q, small), softmax_scale=0.25)
    got = run(q, *pool, small.block_table, small.lens, softmax_scale=0.25)
    assert same(got[0], want[0]) and same(got[1], want[1])


@both
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_b77_lengths_around_a_page(run, page_size: int) -> None:
    cache = make(0, ((page_size - 1, page_size, page_size + 1),), P=page_size, spare=0)
    q = queries(0, cache, 2)
    got = run(*arguments(q, cache), softmax_scale=0.25, probs="none", chunk_size=32)
    want = oracle(q, cache, softmax_scale=0.25)
    assert_close(got, want, torch.float32)
    assert_probs(got[2], want[2])


@both
def test_row_alone_equals_row_in_the_batch(run) -> None:
    """Bitwise, for a given chunk size."""
    cache = make(0, ((37, 5), (0, 64), (16, 70)))
    q = queries(0, cache, 4)
    options = {"softmax_scale": 0.25, "probs": "max", "chunk_size": 32}
    whole = run(*arguments(q, cache), **options)
    for b in range(3):
        row = slice(b, b + 1)
        table, lens = cache.block_table[row], cache.lens[row]
        alone = run(q[row], cache.k_pages, cache.v_pages, table, lens, **options)
        if run is paged_decode_attention_triton:
            assert all(same(x, y[row]) for x, y in zip(alone, whole, strict=True))
        else:  # a matrix product of another size may round differently
            pairs = zip(alone, whole, strict=True)
            assert all(torch.allclose(x, y[row], rtol=0, atol=1e-6) for x, y in pairs)


def test_no_window_equals_a_wide_window_and_no_sink_equals_a_faint_sink() -> None:
    cache = make(0, LENS)
    q = queries(0, cache, 2)
    plain = paged_decode_attention_triton(*arguments(q, cache), softmax_scale=0.25, chunk_size=32)
    wide = paged_decode_attention_triton(
        *arguments(q, cache),
        softmax_scale=0.25,
        chunk_size=32,
        window=2**31 - 1,
        positions=cache.positions,
        q_positions=torch.zeros(2, dtype=torch.int32, device=DEVICE),
        sinks=torch.full((6,), -torch.inf, device=DEVICE),
    )
    assert torch.allclose(plain[0], wide[0], rtol=0, atol=1e-6)
    assert torch.allclose(plain[1], wide[1], rtol=1e-6, atol=1e-6)


@both
def test_strided_inputs(run) -> None:
    """q out of a fused projection, K and V interleaved in one pool, a slice of a wider table."""
    cache = make(0, LENS, spare=3)
    q = queries(0, cache, 2)
    want = run(*arguments(q, cache), softmax_scale=0.25, chunk_size=32)
    fused = torch.full((2, 18, 16), torch.nan, device=DEVICE)
    fused[:, 6:12] = q
    both_pages = torch.stack([cache.k_pages, cache.v_pages], 2)  # [N, P, 2, D]
    k_pages, v_pages = both_pages.unbind(2)
    table = cache.block_table[:, :, :4]
    got = run(
        fused[:, 6:12], k_pages, v_pages, table, cache.lens, softmax_scale=0.25, chunk_size=32
    )
    assert torch.allclose(got[0], want[0], rtol=0, atol=1e-6)


def test_chunk_sizes_come_from_shapes() -> None:
    """As long as whole chunks of all heads still occupy the device."""
    sizes = {(8, 512): 64, (8, 4096): 256, (64, 4096): 1024, (512, 4096): 2048, (8, 131072): 2048}
    assert {shape: default_chunk_size(*shape) for shape in sizes} == sizes


BAD = {
    "q": {"q": torch.zeros(2, 16)},
    "heads": {"q": torch.zeros(2, 5, 16)},
    "head_dim": {"q": torch.zeros(2, 6, 32)},
    "table dtype": {"block_table": torch.zeros(2, 3, 4, dtype=torch.int64)},
    "lengths": {"cache_seqlens": torch.zeros(2, 2, dtype=torch.int32)},
    "pages dtype": {"k_pages": torch.zeros(4, 16, 16, dtype=torch.float16)},
    "sinks": {"sinks": torch.zeros(3)},
    "probs": {"probs": "median"},
    "window without positions": {"window": 4},
    "window": {"window": 0, "positions": torch.zeros(4, 16, dtype=torch.int32)},
}


@both
@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_bad_arguments_are_refused(run, change: dict) -> None:
    arguments = {
        "q": torch.zeros(2, 6, 16),
        "k_pages": torch.zeros(4, 16, 16),
        "v_pages": torch.zeros(4, 16, 16),
        "block_table": torch.zeros(2, 3, 2, dtype=torch.int32),
        "cache_seqlens": torch.zeros(2, 3, dtype=torch.int32),
        "softmax_scale": 1.0,
    }
    with pytest.raises(ValueError, match="expected"):
        run(**(arguments | change))


@pytest.mark.parametrize("chunk", [0, 8, 40])
def test_bad_chunk_sizes_are_refused(chunk: int) -> None:
    cache = make(0, LENS)
    with pytest.raises(ValueError, match="multiple of 16"):
        paged_decode_attention_triton(
            *arguments(queries(0, cache, 1), cache), softmax_scale=1.0, chunk_size=chunk
        )
