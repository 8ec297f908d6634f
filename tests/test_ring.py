"""The ring of last queries against a list, and prompts cut into blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.headwise import Queries, Scores
from sparsekv.ring import QueryRing
from sparsekv.step import Part, in_blocks


def query(position: torch.Tensor) -> torch.Tensor:
    """Queries [B, 1, T, 1] that hold their own position."""
    return position[:, None, :, None].float()


@given(
    rows=st.integers(0, 7),
    prompts=st.tuples(*[st.integers(1, 12)] * 2),
    steps=st.integers(0, 20),
    data=st.data(),
)
def test_ring_remembers_the_last_queries(rows, prompts, steps, data):
    """Two rows of different lengths: a left-padded prompt, then steps."""
    width, tokens = max(prompts), torch.tensor(prompts, dtype=torch.int32)
    rank = torch.arange(width) - (width - tokens)[:, None]
    first = max(width - rows, 0)
    positions = torch.where(rank >= 0, rank, -1)[:, first:]
    q = query(positions)
    ring = QueryRing.of(Queries(q, positions, tokens.clamp(max=rows)), rows, tokens - 1, Scores(1))
    for step in range(steps):
        at = tokens + step
        ring.write(query(at[:, None]), at.long() % max(rows, 1))
    newest = tokens - 1 + steps
    asked = data.draw(st.integers(0, rows))
    got = ring.select_rows(torch.tensor([1, 0])).read(newest.flip(0), asked)
    for row, last in enumerate(newest.flip(0).tolist()):
        expected = [max(position, -1) for position in range(last - asked + 1, last + 1)]
        assert got.positions[row].tolist() == expected
        real = int(got.lengths[row])
        assert real == min(last + 1, asked)
        assert got.q[row, 0, asked - real :, 0].tolist() == expected[asked - real :]


def test_a_clone_is_not_written_to():
    ring = QueryRing(torch.zeros(1, 1, 2, 1), Scores(1))
    copy = ring.clone()
    ring.write(torch.ones(1, 1, 1, 1), torch.tensor([1]))
    assert copy.q.sum() == 0 and ring.q.sum() == 1


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    extra=st.integers(0, 3),
    block=st.integers(1, 8),
)
def test_blocks_hold_the_tokens_of_each_row_in_order(lengths, extra, block):
    """Every column is in one block, and a row's tokens are cut as if it were alone."""
    width = max(max(lengths), 1) + extra
    real = np.array(lengths)
    whole = Part("prefill", 5, width, real, real + 2)
    x = torch.arange(5, 5 + width)[None, None, :, None].expand(len(lengths), 1, -1, 1)
    parts = in_blocks(whole, block)
    assert sum(part.tokens for part in parts) == width
    assert [part.kind for part in parts] == ["prefill"] + ["chunk"] * (len(parts) - 1)
    back = torch.zeros(len(lengths), width, 1, 1, dtype=torch.long)
    for i, part in enumerate(parts):
        own = part.pick(x, 5)
        assert own.shape[2] == part.tokens
        for row, n in enumerate(lengths):
            expected = [5 + width - n + j for j in range(i * block, min(n, i * block + block))]
            assert part.lengths[row] == len(expected)
            assert own[row, 0, part.tokens - len(expected) :, 0].tolist() == expected
            assert part.seen[row] == 2 + min(n, i * block + block)
        part.put(back, own.transpose(1, 2), 5)
    assert torch.equal(back, x.transpose(1, 2))


def test_blocks_without_padding_are_slices():
    parts = in_blocks(Part("chunk", 3, 10, np.array([10, 10]), np.array([12, 14])), 4)
    assert [(part.start, part.tokens) for part in parts] == [(3, 4), (7, 4), (11, 2)]
    assert all(part.columns is None for part in parts)


@pytest.mark.parametrize("rows", [0, 3])
def test_a_step_writes_in_place(rows):
    ring = QueryRing(torch.zeros(2, 4, rows, 8), Scores(1))
    before = ring.q.data_ptr()
    ring.write(torch.ones(2, 4, 1, 8), torch.tensor([1, 2]) % max(rows, 1))
    assert ring.q.data_ptr() == before and ring.q.sum() == (64 if rows else 0)
