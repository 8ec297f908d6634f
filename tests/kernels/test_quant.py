"""Quantised pages: the rule itself, and that append, decode, compact and evict keep to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from decode_oracle import arguments, assert_close, assert_probs, oracle, queries, reduce_group
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_problems import DEVICE, DTYPES, gather, make, ragged_lens, same, values
from quant_problems import FORMATS, Quantised, quantised
from torch import Tensor

from sparsekv.kernels._quant import KV_FORMATS, dequantise, kv_format, quantise, raw
from sparsekv.kernels.append import append_kv_reference, append_kv_triton
from sparsekv.kernels.compact import compact_kv_reference, compact_kv_triton
from sparsekv.kernels.decode import (
    paged_decode_attention_reference,
    paged_decode_attention_triton,
)
from sparsekv.kernels.evict import evict_slot_reference, evict_slot_triton

DISTRIBUTIONS = ["normal", "outliers", "equal", "zeros", "hot"]
formats = pytest.mark.parametrize("name", FORMATS)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are tiny here; a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def wild(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Vectors whose sizes, and whose values inside, span many powers of two; some are zero."""
    gen = torch.Generator().manual_seed(seed)
    size = torch.randint(-20, 15, (*shape[:-1], 1), generator=gen)
    inside = torch.randint(-24, 1, shape, generator=gen) * (torch.rand(1, generator=gen) < 0.5)
    x = torch.randn(shape, generator=gen) * torch.exp2(size + inside)
    return x.masked_fill(torch.rand(shape[:-1], generator=gen)[..., None] < 0.05, 0.0)


# ---------------------------------------------------------------------- the rule


@formats
@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(DTYPES))
def test_error_is_half_a_step(name: str, seed: int, dtype: torch.dtype) -> None:
    """Integers: scale / 2. Floats: half a unit of the last place, or of the smallest subnormal."""
    form, x = KV_FORMATS[name], wild(seed, (3, 7, 48)).to(dtype)
    q, scale = quantise(x, form)
    error = (dequantise(q, scale, torch.float64) - x.double()).abs()
    half = scale.double()[..., None] / 2
    if form.dtype.is_floating_point:
        bits, tiny = (3, 2.0**-9) if name == "fp8_e4m3" else (2, 2.0**-16)
        half = torch.maximum(x.double().abs() * 2.0 ** -(bits + 1), half * tiny)
    assert (error <= half * (1 + 1e-5)).all()
    assert (dequantise(q, scale, torch.float32)[x == 0] == 0).all()
    assert torch.isfinite(scale).all() and (scale > 0).all()


@formats
def test_representable_values_are_exact(name: str) -> None:
    """Every value of a format, times a power of two, where one of them is the limit."""
    form = KV_FORMATS[name]
    if form.dtype.is_floating_point:
        grid = torch.arange(256, dtype=torch.uint8).view(form.dtype).float()
        grid = grid[grid.isfinite()]
    else:
        grid = torch.arange(-form.limit, form.limit + 1)
    grid = torch.cat([grid, torch.full((-len(grid) % 16,), form.limit)])
    for scale in (1.0, 0.25, 2.0**-60, 2.0**30):
        q, got = quantise(grid * scale, form)
        assert float(got) == scale
        assert torch.equal(dequantise(q, got, torch.float32), grid * scale)


def test_half_steps_go_to_the_even_neighbour() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
    q, scale = quantise(x, KV_FORMATS["int8"])
    assert float(scale) == 1.0 and q.tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


def test_int4_layout() -> None:
    """Low nibbles hold the first half of the dims, offset by 8."""
    x = torch.tensor([7.0, -7.0, 0.0, 3.0, -1.0, 2.0, 5.0, -4.0])
    q, _ = quantise(x, KV_FORMATS["int4"])
    assert [(b & 15) - 8 for b in q.tolist()] == [7, -7, 0, 3]
    assert [(b >> 4) - 8 for b in q.tolist()] == [-1, 2, 5, -4]


@formats
def test_tiny_and_zero_vectors(name: str) -> None:
    """No division by zero, no overflow of the format, and zeros stay zeros."""
    x = torch.tensor([[0.0], [1e-45], [-1e-38], [3e-31]]).expand(4, 16)
    q, scale = quantise(x, KV_FORMATS[name])
    back = dequantise(q, scale, torch.float64)
    assert torch.isfinite(back).all() and (back[0] == 0).all()
    assert ((back - x).abs() <= scale[:, None]).all()


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="expected kv_dtype to be None or one of"):
        kv_format("int3")
    with pytest.raises(ValueError, match="multiple of 16 for int4, got 24"):
        kv_format("int4", 24)


# ---------------------------------------------------------------------- append


@formats
@settings(max_examples=25)
@given(data=st.data())
def test_append_kernel_equals_the_rule_bit_by_bit(name: str, data: st.DataObject) -> None:
    """Into drawn slots of drawn tokens; nothing else changes."""
    draw = data.draw
    P, D = draw(st.sampled_from([16, 32, 64])), draw(st.sampled_from([16, 48, 64, 80, 128]))
    rows, heads = draw(st.sampled_from([(1, 1), (1, 3), (2, 2)]))
    seed, count = draw(st.integers(0, 2**31)), draw(st.integers(1, 40))
    pool = quantised(make(seed, draw(ragged_lens(rows, heads, [P])), D=D, P=P), name)
    gen = torch.Generator().manual_seed(seed)
    kv = wild(seed, (2, rows, count, heads, D)).to(draw(st.sampled_from(DTYPES))).to(DEVICE)
    k, v = kv[0].transpose(1, 2), kv[1].transpose(1, 2)
    owned = (pool.cache.block_table != 0).sum(-1).cpu() * P
    order = torch.rand(rows, heads, max(30, pool.cache.k.shape[2]), generator=gen).argsort(-1)
    slots = torch.where(order < owned[..., None], order, -1)[..., :30].int().to(DEVICE)
    index = torch.randint(count, slots.shape, generator=gen, dtype=torch.int32).to(DEVICE)
    results = []
    for run in (append_kv_reference, append_kv_triton):
        new = pool.clone()
        run(
            k, v, *new.cache.pool, new.cache.block_table, slots, slots,
            index=index, **new.scales,
        )  # fmt: skip
        results.append(new.everything())
    assert all(same(a, b) for a, b in zip(*results, strict=True))
    check_written(name, results[0], pool, (k, v), slots, index)


def check_written(name, got: list[Tensor], pool: Quantised, kv, slots: Tensor, index) -> None:
    """Slot by slot: the written vectors by the rule, the others as they were."""
    want, P = pool.clone().everything(), pool.cache.k_pages.shape[1]
    for b, h, i in (slots >= 0).nonzero().tolist():
        slot = int(slots[b, h, i])
        at = int(pool.cache.block_table[b, h, slot // P]), slot % P
        for x, pages, scales in zip(kv, (0, 1), (4, 5), strict=True):
            q, scale = quantise(x[b, h, int(index[b, h, i])], KV_FORMATS[name])
            want[pages][at], want[scales][at] = raw(q), scale
        want[2][at], want[3][at] = slot, 0.0
    assert all(same(a, b) for a, b in zip(got, want, strict=True))


# ---------------------------------------------------------------------- decode


@st.composite
def problems(draw, name: str):
    """(quantised cache, q, options): features on at random."""
    P = draw(st.sampled_from([16, 32, 64]))
    chunk = draw(st.sampled_from([32, 64, 128, None]))
    rows, heads = draw(st.sampled_from([(1, 1), (1, 3), (2, 2)]))
    seed, D = draw(st.integers(0, 2**31)), draw(st.sampled_from([16, 48, 64, 80, 128]))
    lens = draw(ragged_lens(rows, heads, [P, 2 * P, chunk or 128]))
    dtype, dist = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DISTRIBUTIONS))
    cache = make(seed, lens, D=D, P=P, dtype=dtype, dist=dist, spare=draw(st.integers(0, 2)))
    q = queries(seed, cache, draw(st.sampled_from([1, 2, 4, 7])))
    options = {"softmax_scale": draw(st.sampled_from([1.0, 4.0])) * D**-0.5}
    options["softcap"] = draw(st.sampled_from([None, 5.0]))
    if draw(st.booleans()):
        options["sinks"] = torch.arange(q.shape[1], device=DEVICE) - 2.0
    options["window"] = draw(st.sampled_from([None, 1, 17, 10_000]))
    if options["window"] is not None:
        options["q_positions"] = torch.randint(40, 120, (rows,), dtype=torch.int32, device=DEVICE)
    probs = draw(st.sampled_from([None, "none", "mean", "max"]))
    return quantised(cache, name), q, options, {"chunk_size": chunk, "probs": probs}


def check_decode(run, problem) -> None:
    """Against float64 over the dequantised vectors, within the bounds of plain pages."""
    pool, q, options, extra = problem
    cache = pool.cache
    got = run(*arguments(q, cache), positions=cache.positions, **options, **extra, **pool.scales)
    want = oracle(q, cache, **options)
    assert got[0].dtype == q.dtype
    assert_close(got, want, q.dtype)
    if extra["probs"] is not None:
        assert_probs(got[2], reduce_group(want[2], extra["probs"], cache.k.shape[1]))


@formats
@settings(max_examples=25)
@given(data=st.data())
def test_decode_reference_equals_float64(name: str, data: st.DataObject) -> None:
    check_decode(paged_decode_attention_reference, data.draw(problems(name)))


@formats
@settings(max_examples=15)
@given(data=st.data())
def test_decode_kernel_equals_float64(name: str, data: st.DataObject) -> None:
    check_decode(paged_decode_attention_triton, data.draw(problems(name)))


@formats
@pytest.mark.parametrize("size", [0.04, 3e4])
def test_fp16_survives_small_and_large_values(name: str, size: float) -> None:
    """P times a scale leaves the range of fp16 unless a power of two is put aside."""
    cache = make(0, ((40, 33),), D=64, dtype=torch.float16)
    for pages in (cache.v_pages, cache.v):
        pages.copy_((pages.double() / 4 * size).clamp(-6e4, 6e4))
    q = queries(0, cache, 2)
    pool = quantised(cache, name)
    want = oracle(q, pool.cache, softmax_scale=0.125)
    got = paged_decode_attention_triton(
        *arguments(q, pool.cache), softmax_scale=0.125, chunk_size=32, **pool.scales
    )
    error = (got[0].cpu().double() - want[0]).norm() / want[0].norm()
    assert error <= 1e-3


@formats
def test_page_numbers_and_garbage_do_not_matter(name: str) -> None:
    """Bitwise: other pages, and other bytes in slots that nobody owns."""
    results = []
    for page_seed, byte in ((1, 0x7F), (2, 0x00)):
        cache = make(0, ((0, 1, 33), (48, 47, 16)), D=48, page_seed=page_seed, spare=2)
        q, pool = queries(0, cache, 2), quantised(cache, name)
        unowned = cache.positions > 1000
        for pages in (pool.cache.k_pages, pool.cache.v_pages):
            raw(pages)[unowned] = byte
        results.append(
            paged_decode_attention_triton(
                *arguments(q, pool.cache), softmax_scale=0.25, probs="none", chunk_size=32,
                **pool.scales,
            )
        )  # fmt: skip
    assert all(same(a, b) for a, b in zip(*results, strict=True))


# ---------------------------------------------------------------------- compact, evict


@formats
@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**31),
    lens=ragged_lens(2, 2, [16, 32]),
    D=st.sampled_from([16, 48, 64]),
    share=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
)
def test_compact_moves_bytes_and_scales(name, seed, lens, D, share) -> None:
    """The kept (k, v, position, scales) records survive, whatever their order."""
    pool = quantised(make(seed, lens, D=D), name)
    slot = torch.arange(pool.cache.k.shape[2], device=DEVICE)
    gen = torch.Generator().manual_seed(seed)
    keep = (torch.rand(*pool.cache.k.shape[:3], generator=gen) < share).to(DEVICE)
    before = by_position(pool, keep & (slot < pool.cache.lens[..., None]))
    results = []
    for run in (compact_kv_reference, compact_kv_triton):
        new = pool.clone()
        new.cache.lens = run(
            keep, *new.cache.pool, new.cache.block_table, new.cache.lens, **new.scales
        )
        assert by_position(new, slot < new.cache.lens[..., None]) == before
        results.append(new.everything())
    assert all(same(a, b) for a, b in zip(*results, strict=True))


def by_position(pool: Quantised, chosen: Tensor) -> list[dict[int, tuple[bytes, ...]]]:
    """Per head: position -> the bytes of everything else that the chosen slots hold."""
    k, v, pos, score, *scales = (gather(x, pool.cache.block_table) for x in pool.everything())
    heads = []
    for b, h in ((b, h) for b in range(pos.shape[0]) for h in range(pos.shape[1])):
        slots = chosen[b, h].nonzero().flatten().tolist()
        records = {}
        for s in slots:
            parts = (x[b, h, s].cpu().numpy().tobytes() for x in (k, v, score, *scales))
            records[int(pos[b, h, s])] = tuple(parts)
        heads.append(records)
    return heads


@formats
@pytest.mark.parametrize("run", [evict_slot_reference, evict_slot_triton], ids=["ref", "triton"])
def test_evict_moves_bytes_and_scales(name: str, run) -> None:
    """The last slot takes the victim's place with all that belongs to it."""
    pool = quantised(make(3, ((20, 33), (17, 16)), D=48), name)
    cache = pool.cache
    before = by_position(
        pool, torch.arange(cache.k.shape[2], device=DEVICE) < cache.lens[..., None]
    )
    full = torch.full((2, 2), 16, dtype=torch.int32, device=DEVICE)
    run(
        *cache.pool, cache.block_table, cache.lens, action="drop", by="position",
        current=full[:, 0] * 100, budget=full, sinks=full * 0, recent=full * 0, **pool.scales,
    )  # fmt: skip
    after = by_position(pool, torch.arange(cache.k.shape[2], device=DEVICE) < cache.lens[..., None])
    assert cache.lens.tolist() == [[19, 32], [16, 16]]
    for old, new, lost in zip(before, after, (1, 1, 1, 0), strict=True):
        oldest = sorted(old)[:lost]
        assert new == {p: record for p, record in old.items() if p not in oldest}


# ---------------------------------------------------------------------- arguments


@formats
def test_scales_and_pages_go_together(name: str) -> None:
    pool = quantised(make(0, ((5, 3),), D=16), name)
    plain = make(0, ((5, 3),), D=16)
    q = queries(0, plain, 2)
    for run in (paged_decode_attention_reference, paged_decode_attention_triton):
        with pytest.raises(ValueError, match="scales beside quantised pages only"):
            run(*arguments(q, pool.cache), softmax_scale=1.0)
        with pytest.raises(ValueError, match="scales beside quantised pages only"):
            run(*arguments(q, plain), softmax_scale=1.0, **pool.scales)
        with pytest.raises(ValueError, match="expected v_scales of dtype"):
            halves = {**pool.scales, "v_scales": pool.v_scales.half()}
            run(*arguments(q, pool.cache), softmax_scale=1.0, **halves)
    with pytest.raises(ValueError, match="expected k_pages of shape"):
        wide = torch.zeros(1, 4, 32, device=DEVICE)
        paged_decode_attention_triton(
            wide, *arguments(q, pool.cache)[1:], softmax_scale=1.0, **pool.scales
        )


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_gpu_bf16_within_the_bounds_of_plain_pages(name: str, head_dim: int) -> None:
    """And twenty repeats are bitwise equal; append on the GPU equals the rule on the GPU."""
    lens = ((0, 1, 700), (1023, 1024, 1025), (5000, 64, 3))
    cache = make(0, lens, D=head_dim, dtype=torch.bfloat16)
    q, pool = queries(0, cache, 4), quantised(cache, name)
    options = {"softmax_scale": head_dim**-0.5, "probs": "mean", **pool.scales}
    first = paged_decode_attention_triton(*arguments(q, pool.cache), **options)
    want = oracle(q, pool.cache, softmax_scale=head_dim**-0.5)
    assert_close(first, want, torch.bfloat16)
    assert_probs(first[2], reduce_group(want[2], "mean", 3))
    for _ in range(20):
        again = paged_decode_attention_triton(*arguments(q, pool.cache), **options)
        assert all(same(a, b) for a, b in zip(first, again, strict=True))
    k, v = values("outliers", (2, 3, 3, 500, head_dim), torch.Generator()).bfloat16().to(DEVICE)
    slots = torch.arange(500, dtype=torch.int32, device=DEVICE)
    slots = torch.where(slots < cache.lens[..., None], slots, -1)
    results = []
    for run in (append_kv_reference, append_kv_triton):
        new = pool.clone()
        run(k, v, *new.cache.pool, new.cache.block_table, slots, slots, **new.scales)
        results.append(new.everything())
    assert all(same(a, b) for a, b in zip(*results, strict=True))
