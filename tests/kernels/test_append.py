"""Append: what was written is found where the table says, and nothing else changes, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_problems import DEVICE, DTYPES, Paged, bits, lazy_zeros, make, ragged_lens, same
from torch import Tensor

from sparsekv.kernels.append import append_kv, append_kv_reference, append_kv_triton

IMPLEMENTATIONS = {"reference": append_kv_reference, "triton": append_kv_triton}
both = pytest.mark.parametrize("run", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are tiny here; a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tokens(seed: int, cache: Paged, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """k, v [B, HK, T, D] as a model gives them: a transposed view of [B, T, HK, D]."""
    B, HK, _, D = cache.k.shape
    gen = torch.Generator().manual_seed(seed + 7)
    kv = torch.randn(2, B, count, HK, D, generator=gen).to(dtype).to(DEVICE)
    return kv[0].transpose(1, 2), kv[1].transpose(1, 2)


def expected(cache: Paged, k, v, slots, token_positions, index, token_scores) -> list[Tensor]:
    """The four page tensors after the append, one token at a time."""
    pages = [x.cpu().clone() for x in cache.pool]
    table, P = cache.block_table.tolist(), cache.k_pages.shape[1]
    k, v = k.cpu().to(pages[0].dtype), v.cpu().to(pages[0].dtype)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, slots.shape)).tolist():
        slot = int(slots[b, h, i])
        if slot < 0:
            continue
        page, offset = table[b][h][slot // P], slot % P
        t = i if index is None else int(index[b, h, i])
        score = 0.0 if token_scores is None else token_scores[b, h, i].cpu()
        record = k[b, h, t], v[b, h, t], token_positions[b, h, i].cpu(), score
        for target, value in zip(pages, record, strict=True):
            target[page, offset] = value
    return pages


@st.composite
def problems(draw):
    """(cache, arguments, options): appends at the tail, or into drawn slots of drawn tokens."""
    P = draw(st.sampled_from([16, 32, 64]))
    rows, heads = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]))
    seed = draw(st.integers(0, 2**31))
    cache = make(
        seed,
        draw(ragged_lens(rows, heads, [P, 2 * P])),
        D=draw(st.sampled_from([8, 16, 64, 80, 96, 128])),
        P=P,
        dtype=draw(st.sampled_from(DTYPES)),
        spare=2,
    )
    gen = torch.Generator().manual_seed(seed)
    count = draw(st.sampled_from([1, 2, P - 1, P, P + 1]) | st.integers(1, 50))
    k, v = tokens(seed, cache, count, draw(st.sampled_from([cache.k.dtype, torch.float32])))
    options = {"index": None, "token_scores": None}
    n = count
    owned = (cache.block_table != 0).sum(-1) * P  # slots that exist, [B, HK]
    if draw(st.booleans()):
        n = draw(st.integers(1, 40))
        options["index"] = torch.randint(count, (rows, heads, n), generator=gen, dtype=torch.int32)
        order = torch.rand(rows, heads, max(n, cache.k.shape[2]), generator=gen).argsort(-1)
        slots = torch.where(order < owned.cpu()[..., None], order, -1)[..., :n]
        slots[torch.rand(slots.shape, generator=gen) < 0.2] = -1
    else:
        slots = cache.lens.cpu()[..., None] + torch.arange(n)
        slots = torch.where(slots < owned.cpu()[..., None], slots, -1)
    positions = torch.randint(1000, slots.shape, generator=gen, dtype=torch.int32)
    if draw(st.booleans()):
        options["token_scores"] = torch.rand(slots.shape, generator=gen)
    options = {name: None if x is None else x.to(DEVICE) for name, x in options.items()}
    return cache, (k, v, slots.int().to(DEVICE), positions.to(DEVICE)), options


def check_append(run, problem) -> None:
    cache, (k, v, slots, positions), options = problem
    want = expected(cache, k, v, slots, positions, **options)
    inputs = [x.clone() for x in (k, v, slots, positions, cache.block_table)]
    run(k, v, *cache.pool, cache.block_table, slots, positions, **options)
    for got, pages in zip(cache.pool, want, strict=True):
        assert same(got.cpu(), pages)
    for x, before in zip((k, v, slots, positions, cache.block_table), inputs, strict=True):
        assert torch.equal(x, before)


@settings(max_examples=60)
@given(problems())
def test_reference_equals_a_loop(problem) -> None:
    check_append(append_kv_reference, problem)


@settings(max_examples=40)
@given(problems())
def test_kernel_equals_a_loop(problem) -> None:
    check_append(append_kv_triton, problem)


@both
def test_decode_step(run) -> None:
    """One token per head, positions and slots expanded views, a row that takes no part."""
    cache = make(0, ((6, 16, 17), (1, 32, 34)))  # one slot more than in use: its page exists
    k, v = tokens(0, cache, 1, torch.float32)
    slots = cache.lens[..., None] - 1
    slots[1] = -1
    position = torch.tensor([70, 71], dtype=torch.int32, device=DEVICE).view(2, 1, 1)
    run(k, v, *cache.pool, cache.block_table, slots, position.expand(2, 3, 1))
    for h, slot in enumerate((5, 15, 16)):
        page, offset = int(cache.block_table[0, h, slot // 16]), slot % 16
        assert torch.equal(cache.k_pages[page, offset], k[0, h, 0])
        assert torch.equal(cache.v_pages[page, offset], v[0, h, 0])
        assert int(cache.positions[page, offset]) == 70
        assert float(cache.scores[page, offset]) == 0.0
    assert int((cache.positions == 71).sum()) == 0


@both
def test_nothing_to_do(run) -> None:
    """All slots -1, or no slots at all: not one bit changes."""
    cache = make(0, ((3, 0),))
    before = cache.clone_pool()
    k, v = tokens(0, cache, 4, torch.float32)
    skip = torch.full((1, 2, 4), -1, dtype=torch.int32, device=DEVICE)
    run(k, v, *cache.pool, cache.block_table, skip, skip)
    none = skip[..., :0]
    run(k, v, *cache.pool, cache.block_table, none, none, index=none)
    assert all(same(a, b) for a, b in zip(before, cache.pool, strict=True))


@both
def test_every_slot_is_written_once(run) -> None:
    """A prompt into empty heads, over three pages: each record in its place."""
    lens = ((40, 40),)
    cache = make(0, lens)
    k, v = cache.k[:, :, :40], cache.v[:, :, :40]
    slots = torch.arange(40, dtype=torch.int32, device=DEVICE).expand(1, 2, 40)
    want = cache.clone_pool()
    for pages, poison in zip(cache.pool, (torch.nan, torch.nan, -5, torch.nan), strict=True):
        pages.fill_(poison)
    score = cache.score[:, :, :40].contiguous()
    position = cache.pos[:, :, :40]
    run(k, v, *cache.pool, cache.block_table, slots, position, token_scores=score)
    cache.positions[cache.positions == -5] = 1 << 30
    assert all(same(a, b) for a, b in zip(want, cache.pool, strict=True))


@both
def test_pages_interleaved_in_one_pool(run) -> None:
    cache = make(0, ((17, 3),))
    pool = torch.zeros(*cache.k_pages.shape[:2], 2, 16, device=DEVICE)  # [N, P, 2, D]
    k_pages, v_pages = pool.unbind(2)
    k, v = tokens(0, cache, 2, torch.float32)
    slots = torch.tensor([[[16, 2], [0, 1]]], dtype=torch.int32, device=DEVICE)
    args = (cache.positions, cache.scores, cache.block_table, slots, slots)
    run(k, v, k_pages, v_pages, *args)
    page = int(cache.block_table[0, 0, 1])
    assert torch.equal(pool[page, 0], torch.stack([k[0, 0, 0], v[0, 0, 0]]))
    assert int((pool != 0).any(-1).sum()) == 8


@both
def test_b76_offsets_beyond_int32(run) -> None:
    """Pages 2^30 elements apart: page 2 starts past 2^31. Untouched memory costs nothing."""
    cache = make(0, ((20,),), dtype=torch.float16, spare=0)
    stride = 1 << 30
    far = [lazy_zeros(2 * stride + 256).as_strided((3, 16, 16), (stride, 16, 1)) for _ in "kv"]
    k, v = tokens(0, cache, 2, torch.float16)
    slots = torch.tensor([[[3, 17]]], dtype=torch.int32, device=DEVICE)
    run(k, v, *far, cache.positions, cache.scores, cache.block_table, slots, slots)
    for i, (page, offset) in enumerate(zip(cache.block_table[0, 0].tolist(), (3, 1), strict=True)):
        assert same(far[0][page, offset], k[0, 0, i]) and same(far[1][page, offset], v[0, 0, i])


BAD = {
    "head_dim": {"k": torch.zeros(1, 2, 4, 32), "v": torch.zeros(1, 2, 4, 32)},
    "v": {"v": torch.zeros(1, 2, 3, 16)},
    "n": {"slots": torch.zeros(1, 2, 3, dtype=torch.int32)},
    "slots dtype": {"slots": torch.zeros(1, 2, 4, dtype=torch.int64)},
    "positions": {"positions": torch.zeros(3, 8, dtype=torch.int32)},
    "strided positions": {"positions": torch.zeros(16, 3, dtype=torch.int32).T},
    "scores": {"scores": torch.zeros(3, 16, dtype=torch.float16)},
    "table": {"block_table": torch.zeros(1, 1, 1, dtype=torch.int32)},
    "index": {"index": torch.zeros(1, 2, 3, dtype=torch.int32)},
    "token_scores": {"token_scores": torch.zeros(1, 2, 4, dtype=torch.float64)},
    "layout": {"k": torch.zeros(1, 2, 16, 4).transpose(2, 3)},
}


@both
@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_bad_arguments_are_refused(run, change: dict) -> None:
    arguments = {
        "k": torch.zeros(1, 2, 4, 16),
        "v": torch.zeros(1, 2, 4, 16),
        "k_pages": torch.zeros(3, 16, 16),
        "v_pages": torch.zeros(3, 16, 16),
        "positions": torch.zeros(3, 16, dtype=torch.int32),
        "scores": torch.zeros(3, 16),
        "block_table": torch.zeros(1, 2, 1, dtype=torch.int32),
        "slots": torch.zeros(1, 2, 4, dtype=torch.int32),
        "token_positions": torch.zeros(1, 2, 4, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match="expected"):
        run(**(arguments | change))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_gpu_repeats_bitwise(dtype: torch.dtype, head_dim: int) -> None:
    cache = make(0, ((1000, 3, 0), (17, 4000, 64)), D=head_dim, dtype=dtype)
    k, v = tokens(0, cache, 500, dtype)
    order = torch.argsort(torch.rand(2, 3, cache.k.shape[2], device=DEVICE), -1)
    owned = (cache.block_table != 0).sum(-1, keepdim=True) * 16
    slots = torch.where(order < owned, order, -1)[..., :500].int()
    want = cache.clone_pool()
    append_kv_reference(k, v, *want, cache.block_table, slots, slots)
    for _ in range(20):
        got = cache.clone_pool()
        append_kv(k, v, *got, cache.block_table, slots, slots)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))


@both
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 3),
    heads=st.integers(1, 3),
    T=st.integers(1, 40),
)
def test_kept_tokens_need_only_an_index(run, seed, rows, heads, T):
    """Slot i, position index, source index + offset, as if all had been spelt out."""
    gen = torch.Generator().manual_seed(seed)
    lens = torch.full((rows, heads), 48).tolist()
    cache = make(seed, lens, D=16, P=16, dtype=torch.float32, spare=2)
    k, v = tokens(seed, cache, T + 5, torch.float32)
    index = torch.rand(rows, heads, T, generator=gen).argsort(-1).int()
    index = torch.where(torch.rand(rows, heads, T, generator=gen) < 0.3, -1, index).to(DEVICE)
    offsets = torch.randint(0, 6, (rows,), generator=gen).int().to(DEVICE)
    scores = torch.rand(rows, heads, T, generator=gen).to(DEVICE)
    slots = torch.where(index >= 0, torch.arange(T, device=DEVICE), -1).int()
    source = index.clamp_min(0) + offsets[:, None, None]
    want = expected(cache, k, v, slots, index, source, scores)
    got = cache.clone_pool()
    run(
        k, v, *got, cache.block_table, None, None, index=index, offsets=offsets, token_scores=scores
    )
    assert all(same(a.cpu(), b) for a, b in zip(got, want, strict=True))


@both
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 3), heads=st.integers(1, 3))
def test_a_token_goes_behind_the_slots_in_use_and_is_counted(run, seed, rows, heads):
    """Positions of a row are shared by its heads."""
    gen = torch.Generator().manual_seed(seed)
    lens = torch.randint(0, 47, (rows, heads), generator=gen)
    cache = make(seed, torch.full((rows, heads), 48).tolist(), D=16, P=16, dtype=torch.float32)
    k, v = tokens(seed, cache, 1, torch.float32)
    counts = lens.int().to(DEVICE)
    positions = torch.randint(0, 1000, (rows,), generator=gen).int().to(DEVICE)
    positions = positions[:, None, None].expand(rows, heads, 1)
    want = expected(cache, k, v, lens[..., None], positions, None, None)
    got = cache.clone_pool()
    run(k, v, *got, cache.block_table, None, positions, cache_seqlens=counts)
    assert all(same(a.cpu(), b) for a, b in zip(got, want, strict=True))
    assert torch.equal(counts.cpu(), lens.int() + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "expected slots, an index or cache_seqlens"),
        ({"cache_seqlens": (1, 1), "index": (1, 1, 1)}, "no slots, index or offsets"),
        ({"slots": (1, 1, 1)}, "expected token_positions"),
    ],
)
def test_arguments_that_do_not_belong_together(change, message):
    """Each with its reason."""
    cache = make(0, [[5]], D=16, P=16, dtype=torch.float32)
    k, v = tokens(0, cache, 1, torch.float32)
    given = {
        name: torch.zeros(shape, dtype=torch.int32, device=DEVICE) for name, shape in change.items()
    }
    with pytest.raises(ValueError, match=message):
        append_kv(k, v, *cache.pool, cache.block_table, given.pop("slots", None), None, **given)
