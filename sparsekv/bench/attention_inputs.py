"""Random tensors of the kernel cases: packed prefill inputs, paged decode inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekv.bench.case import Context
from sparsekv.bench.timing import copies

PAGE = 16


@dataclass(frozen=True)
class Geometry:
    """Heads and dtype of a model's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize

    @property
    def scale(self) -> float:
        """The usual softmax scale."""
        return self.head_dim**-0.5


LLAMA_8B = Geometry(32, 8, 128, torch.bfloat16)
TINY = Geometry(4, 2, 16, torch.float32)


def geometry(tiny: bool) -> Geometry:
    """The shape that all kernel cases use."""
    return TINY if tiny else LLAMA_8B


@dataclass(frozen=True)
class Packed:
    """B sequences of T tokens: q [B T, HQ, D], k and v [B T, HK, D], cu_seqlens int32 [B + 1]."""

    rows: int
    tokens: int
    heads: Geometry
    q: Tensor
    k: Tensor
    v: Tensor
    cu: Tensor

    def by_head(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same memory as [B, H, T, D] views, as transformers hands it to SDPA."""
        shape = (self.rows, self.tokens)
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in (self.q, self.k, self.v))
        return q, k, v


def packed(context: Context, rows: int, tokens: int) -> Packed:
    """Normal values."""
    heads = geometry(context.tiny)
    generator = torch.Generator(context.device).manual_seed(0)

    def draw(count: int) -> Tensor:
        shape = (rows * tokens, count, heads.head_dim)
        return torch.randn(shape, generator=generator, device=context.device, dtype=heads.dtype)

    cu = torch.arange(rows + 1, device=context.device, dtype=torch.int32) * tokens
    return Packed(
        rows, tokens, heads, draw(heads.heads), draw(heads.kv_heads), draw(heads.kv_heads), cu
    )


@dataclass(frozen=True)
class Paged:
    """C caches of B rows and S slots, used in turn; a page belongs to one KV head.

    q [B, HQ, D]; k, v [C, N, P, D]; positions int32 and scores fp32 [C, N, P]; table int32
    [B, HK, S / P], pages in random order; lens int32 [B, HK].
    """

    rows: int
    slots: int
    heads: Geometry
    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    scores: Tensor
    table: Tensor
    lens: Tensor

    @property
    def caches(self) -> range:
        """Numbers of the caches."""
        return range(len(self.k))


def paged(
    context: Context, rows: int, slots: int, keep: float = 1.0, ragged: bool = False
) -> Paged:
    """Normal values; each head holds keep * S slots, or, ragged, half to one and a half of that."""
    heads, device = geometry(context.tiny), context.device
    generator = torch.Generator(device).manual_seed(0)
    pages = rows * heads.kv_heads * -(-slots // PAGE)
    page_bytes = PAGE * heads.head_dim * heads.itemsize
    count = copies(2 * pages * page_bytes * keep, context)
    shape = (count, pages + 1, PAGE, heads.head_dim)  # page 0 is the null page

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=heads.dtype)

    table = 1 + torch.randperm(pages, generator=generator, device=device, dtype=torch.int32)
    lens = torch.full((rows, heads.kv_heads), round(slots * keep), dtype=torch.int32, device=device)
    if ragged:  # pairs of heads, one longer by what the other is shorter
        half = heads.kv_heads // 2
        spread = torch.arange(1, half + 1, device=device) / (2 * half)
        lens = (lens * (1 + torch.cat([spread, -spread.flip(0)]))).round().int()
    return Paged(
        rows, slots, heads, draw(rows, heads.heads, heads.head_dim), draw(*shape), draw(*shape),
        torch.zeros(shape[:3], dtype=torch.int32, device=device),
        torch.zeros(shape[:3], dtype=torch.float32, device=device),
        table.view(rows, heads.kv_heads, -1), lens,
    )  # fmt: skip
