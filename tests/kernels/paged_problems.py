"""Ragged paged caches for the tests of decode, append and compact.

The pool is poisoned: every slot that no head owns holds NaN (positions: a huge number), page 0 (the
null page) included, and pages are handed out in a random order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter has no bf16 arithmetic.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
HUGE = 1 << 30

Lens = tuple[tuple[int, ...], ...]  # [row][KV head]


@dataclass
class Paged:
    """A cache, and what it holds, densely."""

    k_pages: Tensor  # [N, P, D]
    v_pages: Tensor
    positions: Tensor  # int32 [N, P]
    scores: Tensor  # fp32 [N, P]
    block_table: Tensor  # int32 [B, HK, maxP]
    lens: Tensor  # int32 [B, HK]
    k: Tensor  # [B, HK, S, D] logical slots, NaN beyond a length
    v: Tensor
    pos: Tensor  # int32 [B, HK, S]
    score: Tensor  # fp32 [B, HK, S]

    @property
    def pool(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k_pages, self.v_pages, self.positions, self.scores

    def clone_pool(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        k, v, positions, scores = self.pool
        return k.clone(), v.clone(), positions.clone(), scores.clone()


def values(name: str, shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    """Keys or values of one of the distributions that break attention codes."""
    x = torch.randn(shape, generator=gen)
    if name == "outliers":  # FlashAttention-3's law
        return x + 10 * torch.randn(shape, generator=gen) * (
            torch.rand(shape, generator=gen) < 1e-2
        )
    if name == "equal":
        return torch.full(shape, 0.75)
    if name == "zeros":
        return torch.zeros(shape)
    if name == "hot" and len(shape) > 1 and shape[-2]:  # one key that takes everything
        x[..., shape[-2] // 3, :] *= 12
    return x


def make(
    seed: int,
    lens: Lens,
    *,
    D: int = 16,
    P: int = 16,
    dtype: torch.dtype = torch.float32,
    dist: str = "normal",
    spare: int = 1,
    page_seed: int | None = None,
) -> Paged:
    """A cache of B = len(lens) rows. spare: table columns and pages beyond what the lengths need.

    page_seed changes the page numbers and nothing else.
    """
    gen = torch.Generator().manual_seed(seed)
    B, HK = len(lens), len(lens[0])
    count = torch.tensor(lens, dtype=torch.int32)
    need = [[-(-n // P) for n in row] for row in lens]
    max_pages = max(max(row) for row in need) + spare
    S, N = max_pages * P, 1 + sum(map(sum, need)) + spare

    shape = (B, HK, S)
    valid = torch.arange(S) < count[..., None]
    k = values(dist, (*shape, D), gen).to(dtype).masked_fill(~valid[..., None], torch.nan)
    v = values("normal", (*shape, D), gen).to(dtype).masked_fill(~valid[..., None], torch.nan)
    pos = torch.argsort(torch.rand(shape, generator=gen), -1).int().masked_fill(~valid, HUGE)
    score = torch.rand(shape, generator=gen).masked_fill(~valid, torch.nan)

    order = torch.Generator().manual_seed(seed if page_seed is None else page_seed)
    ids = (1 + torch.randperm(N - 1, generator=order)).tolist()
    table = torch.zeros(B, HK, max_pages, dtype=torch.int32)
    pages = [
        torch.full((N, P, D), torch.nan, dtype=dtype),
        torch.full((N, P, D), torch.nan, dtype=dtype),
        torch.full((N, P), HUGE, dtype=torch.int32),
        torch.full((N, P), torch.nan),
    ]
    for b in range(B):
        for h in range(HK):
            for c in range(need[b][h]):
                table[b, h, c] = page = ids.pop()
                for target, source in zip(pages, (k, v, pos, score), strict=True):
                    target[page] = source[b, h, c * P : (c + 1) * P]
    tensors = (*pages, table, count, k, v, pos, score)
    return Paged(*(x.to(DEVICE) for x in tensors))


def ragged_lens(rows: int, heads: int, edges: list[int]) -> st.SearchStrategy[Lens]:
    """Lengths per row and head: empty, one slot, around the given edges, anything to 100."""
    near = sorted({max(0, e + d) for e in edges for d in (-1, 0, 1)} | {0, 1})
    length = st.sampled_from(near) | st.integers(0, 100)
    row = st.tuples(*[length] * heads)
    return st.tuples(*[row] * rows)


def gather(pages: Tensor, table: Tensor) -> Tensor:
    """Logical view [B, HK, maxP * P, ...] of a pool."""
    return pages[table.long()].flatten(2, 3)


def same(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality, NaN included."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    )


def lazy_zeros(count: int) -> Tensor:
    """fp16 zeros; on the CPU the system maps a page of memory only when it is written."""
    if DEVICE == "cuda":
        return torch.zeros(count, dtype=torch.float16, device=DEVICE)
    return torch.from_numpy(np.zeros(count, dtype=np.float16))
