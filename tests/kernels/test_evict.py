"""The slot that a decode step gives up: against loops over Python lists, in any program order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_problems import DEVICE, DTYPES, Paged, gather, make, ragged_lens, same
from torch import Tensor

from sparsekv.kernels import evict
from sparsekv.kernels.evict import evict_slot, evict_slot_reference, evict_slot_triton


def small_tiles(*args: Any, **kwargs: Any) -> Tensor | None:
    """The kernel in steps of 16 slots, so that short heads take several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evict, "_CONFIG", (16, 4))
        return evict_slot_triton(*args, **kwargs)


IMPLEMENTATIONS = {
    "reference": evict_slot_reference,
    "triton": evict_slot_triton,
    "triton-small-tiles": small_tiles,
}
both = pytest.mark.parametrize("run", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
many = settings(max_examples=120)
CALLS = st.fixed_dictionaries(
    {
        "action": st.sampled_from(["observe", "replace", "drop"]),
        "by": st.sampled_from(["score", "position"]),
        "decay": st.sampled_from([1.0, 0.75]),
        "with_probs": st.booleans(),
        "budget": st.tuples(*[st.tuples(*[st.integers(1, 100)] * 2)] * 2),
        "sinks": st.tuples(*[st.tuples(*[st.integers(0, 6)] * 2)] * 2),
        "recent": st.tuples(*[st.tuples(*[st.integers(0, 30)] * 2)] * 2),
        "levels": st.sampled_from([1, 3, 1 << 20]),  # distinct score values: ties, many, few
        "nans": st.booleans(),
    }
)


def problem(seed: int, lens: Any, call: dict[str, Any], dtype: torch.dtype) -> tuple[Paged, dict]:
    """A cache whose positions are a permutation of 0 .. n-1 per head, and the call's arguments."""
    cache = make(seed, lens, dtype=dtype)
    levels = call["levels"]
    cache.scores.copy_((cache.scores * levels).floor() / levels)
    gen = torch.Generator().manual_seed(seed)
    if call["nans"]:
        bad = torch.rand(cache.scores.shape, generator=gen).to(DEVICE) < 0.1
        cache.scores.masked_fill_(bad, torch.nan)
    slots = cache.block_table.shape[2] * cache.k_pages.shape[1]
    probs = (torch.rand(*cache.lens.shape, slots, generator=gen) * levels).floor() / levels
    kwargs = {name: call[name] for name in ("action", "by", "decay")}
    kwargs["probs"] = probs.to(DEVICE) if call["with_probs"] else None
    for name in ("budget", "sinks", "recent"):
        kwargs[name] = torch.tensor(call[name], dtype=torch.int32, device=DEVICE)
    kwargs["current"] = gather(cache.positions, cache.block_table).flatten(1)
    held = kwargs["current"].masked_fill(kwargs["current"] > 1 << 20, 0)
    kwargs["current"] = held.amax(1)
    return cache, kwargs


def expected_head(cache: Paged, kwargs: dict[str, Any], b: int, h: int) -> tuple[list, int, int]:
    """(records in slot order, new length, slot to write) of one head, by the definition."""
    n, budget = int(cache.lens[b, h]), int(kwargs["budget"][b, h])
    pos = gather(cache.positions, cache.block_table)[b, h, :n].tolist()
    score = gather(cache.scores, cache.block_table)[b, h, :n]
    if kwargs["probs"] is not None:
        score = score * kwargs["decay"] + kwargs["probs"][b, h, :n]
    score = score.tolist()
    records = [(j, p, s) for j, (p, s) in enumerate(zip(pos, score, strict=True))]
    low, high = int(kwargs["sinks"][b, h]), int(kwargs["current"][b] - kwargs["recent"][b, h])

    def key(record: tuple[int, int, float]) -> tuple[float, int]:
        _, p, s = record
        return (0.0 if kwargs["by"] == "position" else -math.inf if math.isnan(s) else s, p)

    candidates = [record for record in records if low <= record[1] <= high]
    victim = min(candidates, key=key)[0] if candidates else None
    if kwargs["action"] == "replace":
        slot = n if n < budget else (victim or 0)
        return records, max(n, slot + 1), slot
    if kwargs["action"] == "drop" and n > budget and victim is not None:
        records[victim] = records[-1]
        return records[:-1], n - 1, -1
    return records, n, -1


def check(run: Any, cache: Paged, kwargs: dict[str, Any]) -> None:
    before_k, before_v = cache.k.clone(), cache.v.clone()
    heads = [(b, h) for b in range(cache.lens.shape[0]) for h in range(cache.lens.shape[1])]
    expected = {(b, h): expected_head(cache, kwargs, b, h) for b, h in heads}
    slots = run(*cache.pool, cache.block_table, cache.lens, **kwargs)
    assert (slots is None) == (kwargs["action"] != "replace")
    k, v, pos, score = (gather(pages, cache.block_table) for pages in cache.pool)
    for (b, h), (records, length, slot) in expected.items():
        assert int(cache.lens[b, h]) == length
        if slots is not None:
            assert int(slots[b, h]) == slot
        for place, (source, p, s) in enumerate(records):
            assert int(pos[b, h, place]) == p
            assert float(score[b, h, place]) == pytest.approx(s, rel=1e-6, nan_ok=True)
            assert same(k[b, h, place], before_k[b, h, source])
            assert same(v[b, h, place], before_v[b, h, source])


@both
@many
@given(
    seed=st.integers(0, 2**31),
    lens=ragged_lens(2, 2, [16, 32]),
    call=CALLS,
    dtype=st.sampled_from(DTYPES),
)
def test_equals_loops_over_lists(run, seed, lens, call, dtype):
    check(run, *problem(seed, lens, call, dtype))


PLAIN = {
    "by": "score",
    "decay": 1.0,
    "with_probs": True,
    "budget": ((20, 20), (20, 3)),
    "sinks": ((2, 2), (0, 1)),
    "recent": ((4, 0), (0, 2)),
    "levels": 3,
    "nans": False,
}


@both
@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (0, 1), (3, 5)])
def test_protection_ends_where_it_says(run, sinks, recent):
    """Among falling scores the victim is the newest key that is not recent, else the first."""
    for sign, victim in ((-1.0, 19 - recent), (1.0, sinks)):
        cache = make(0, ((20,),))
        page, slot = cache.block_table[0, 0, :2].long(), torch.arange(32, device=DEVICE)
        cache.positions[page] = slot.view(2, 16).int()
        cache.scores[page] = sign * slot.view(2, 16).float()
        one = torch.ones(1, dtype=torch.int32, device=DEVICE)
        limits = {"current": 19 * one, "budget": 20 * one[None], "sinks": sinks * one[None]}
        slots = run(
            *cache.pool, cache.block_table, cache.lens,
            action="replace", by="score", recent=recent * one[None], **limits,
        )  # fmt: skip
        assert int(slots) == victim


@pytest.mark.parametrize("action", ["observe", "replace", "drop"])
def test_programs_in_any_order(action):
    """Heads do not depend on one another."""
    results = []
    for _ in range(3):
        cache, kwargs = problem(5, ((21, 64), (33, 7)), {**PLAIN, "action": action}, torch.float32)
        run = evict_slot_triton
        slots = run(*cache.pool, cache.block_table, cache.lens, **kwargs)
        results.append((*cache.clone_pool(), cache.lens, slots))
    for other in results[1:]:
        pairs = zip(results[0], other, strict=True)
        assert all(same(a, b) for a, b in pairs if isinstance(a, Tensor))


def test_errors_say_what_was_expected():
    cache, kwargs = problem(1, ((3,), (4,)), {**PLAIN, "action": "drop"}, torch.float32)
    kwargs |= {x: kwargs[x][:, :1].contiguous() for x in ("budget", "sinks", "recent")}
    args = (*cache.pool, cache.block_table, cache.lens)
    with pytest.raises(ValueError, match="expected action to be one of"):
        evict_slot(*args, **{**kwargs, "action": "remove"})
    with pytest.raises(ValueError, match=r"expected budget of shape \[2, 1\]"):
        evict_slot(*args, **{**kwargs, "budget": kwargs["budget"][:1]})
    with pytest.raises(ValueError, match="expected contiguous recent"):
        evict_slot(*args, **{**kwargs, "recent": kwargs["recent"][:1].expand(2, 1)})
    with pytest.raises(ValueError, match="expected contiguous cache_seqlens"):
        evict_slot(*args[:-1], cache.lens.expand(2, 1).T.expand(2, 2)[:, :1], **kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("action", ["observe", "replace", "drop"])
def test_gpu_repeats_are_bitwise_equal(action):
    """One program a head and a total order: twenty runs, one result."""
    results = []
    for _ in range(20):
        call = {**PLAIN, "action": action, "budget": ((2000, 1000), (900, 900))}
        cache, kwargs = problem(7, ((3000, 2001), (2500, 901)), call, torch.bfloat16)
        slots = evict_slot(*cache.pool, cache.block_table, cache.lens, **kwargs)
        results.append((*cache.clone_pool(), cache.lens, slots))
    for other in results[1:]:
        pairs = zip(results[0], other, strict=True)
        assert all(same(a, b) for a, b in pairs if isinstance(a, Tensor))
