"""paged_sums: the kernel against its reference, and the reference against the formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import BLOCKS

from sparsekv.kernels.paged_sums import (
    add_attention,
    add_attention_reference,
    add_attention_triton,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GARBAGE = 1e9


def case(counts, lengths, slots, *, kv_heads, group, dim, size, tokens_first, seed):
    """Arguments of a step: blocks in any order, keys beside values, garbage in what is not held."""
    gen = torch.Generator().manual_seed(seed)
    rows, columns = len(counts), max(-(-n // size) for n in lengths) + 1
    shape = (size, kv_heads) if tokens_first else (kv_heads, size)
    cache = torch.randn(rows * columns + 1, *shape, 2 * dim, generator=gen)
    cache = cache.transpose(1, 2) if tokens_first else cache
    keys = cache.to(DEVICE)[..., :dim]
    sums = torch.rand(len(cache), kv_heads, size, generator=gen)
    table = (torch.randperm(rows * columns, generator=gen) + 1).view(rows, columns).int()
    for row, n in enumerate(lengths):  # the newest token's place and all beyond
        for j in range(n - 1, columns * size):
            sums[table[row, j // size], :, j % size] = GARBAGE
    start = torch.tensor([0, *counts]).cumsum(0).int()
    query = torch.randn(int(start[-1]) + 2, (group + 2) * kv_heads * dim, generator=gen)
    query = query.to(DEVICE)[:, : group * kv_heads * dim].unflatten(1, (-1, dim))
    step = [start, torch.tensor(lengths).int(), torch.tensor(slots).int(), table]
    return query, keys, sums.to(DEVICE), *(x.to(DEVICE) for x in step)


def expected(query, keys, sums, start, lengths, slots, table, scale, softcap, reduction):
    """Token by token in float64."""
    out, size = sums.clone().double(), keys.shape[2]
    group = query.shape[1] // keys.shape[1]
    for row, n in enumerate(lengths.tolist()):
        if slots[row] < 0 or start[row + 1] - start[row] != 1:
            continue
        where = [(int(table[row, j // size]), j % size) for j in range(n)]
        for head in range(keys.shape[1]):
            held = torch.stack([keys[b, head, o] for b, o in where]).double()
            q = query[start[row], head * group : (head + 1) * group].double()
            x = q @ held.T * scale
            p = (x if softcap is None else softcap * (x / softcap).tanh()).softmax(-1)
            share = {"mean": p.mean(0), "max": p.amax(0), "sum": p.sum(0)}[reduction]
            for (block, offset), s in list(zip(where, share, strict=True))[:-1]:
                out[block, head, offset] += s
            out[where[-1][0], head, where[-1][1]] = share[-1]
    return out


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    group=st.integers(1, 4),
    **BLOCKS,
)
def test_sums(lengths, kv_heads, group, dim, size, tokens_first, softcap, reduction, seed) -> None:
    counts, slots = [1] * len(lengths), list(range(len(lengths)))
    shape = {"kv_heads": kv_heads, "group": group, "dim": dim, "size": size}
    step = case(counts, lengths, slots, **shape, tokens_first=tokens_first, seed=seed)
    how = {"softmax_scale": dim**-0.5, "softcap": softcap, "reduction": reduction}
    wanted = expected(*step, dim**-0.5, softcap, reduction).float()
    for run in (add_attention, add_attention_triton, add_attention_reference):
        query, keys, sums, *rest = step
        found = sums.clone()
        run(query, keys, found, *rest, **how)
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("run", [add_attention_triton, add_attention_reference])
def test_rows_that_are_left_alone(run) -> None:
    """Prompts, rows without a query and padding; each query of the others finds its own row."""
    shape = {"kv_heads": 2, "group": 2, "dim": 16, "size": 16, "tokens_first": True, "seed": 0}
    step = case([3, 1, 0, 1, 1], [40, 50, 1, 1, 33], [0, 1, 2, -1, 3], **shape)
    query, keys, sums, *rest = step
    found = sums.clone()
    run(query, keys, found, *rest, softmax_scale=0.25)
    wanted = expected(*step, 0.25, None, "mean").float()
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6)
    changed = (found != sums).flatten(1).any(1).nonzero().flatten().tolist()
    held = [*rest[3][1, :4].tolist(), *rest[3][4, :3].tolist()]  # 50 and 33 tokens
    assert sorted(changed) == sorted(held)


def test_what_does_not_fit() -> None:
    shape = {"kv_heads": 2, "group": 2, "dim": 16, "size": 16, "tokens_first": True, "seed": 0}
    query, keys, sums, *rest = case([1], [40], [0], **shape)
    with pytest.raises(ValueError, match="sums of shape"):
        add_attention(query, keys, sums[:, :1], *rest, softmax_scale=1.0)
    with pytest.raises(ValueError, match="keys of dtype"):
        add_attention(query, keys.half(), sums, *rest, softmax_scale=1.0)
    with pytest.raises(ValueError, match="contiguous sums"):
        other = sums.transpose(1, 2).contiguous().transpose(1, 2)
        add_attention(query, keys, other, *rest, softmax_scale=1.0)
    with pytest.raises(ValueError, match="reduction"):
        add_attention(query, keys, sums, *rest, softmax_scale=1.0, reduction="median")
    with pytest.raises(ValueError, match="lengths of dtype"):
        add_attention(query, keys, sums, rest[0], rest[1].long(), *rest[2:], softmax_scale=1.0)
