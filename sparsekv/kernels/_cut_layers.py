"""Requests of which blocks must go, in many layers at once: what their kernels share.

M requests hold `pinned` blocks and the blocks from `before` on, n tokens in all; blocks `before` ..
`now` must go. Their tokens and the pinned ones are candidates, slots 0 .. c - 1 of what is held:

    slot j  ->  block table[row, b],  b = j // P,  plus before - pinned from the pinned blocks on
    n = computed - (before - pinned) P          c = (pinned + now - before) P

Layers are told apart by how far their tensors lie from the first layer's, so that one launch serves
all of them: programs own a layer, a request and a KV head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import check_alike, check_dtype, check_shape, distances, send

UNIT = 16  # bytes in which distances between tensors are counted: loads stay wide


@triton.jit
def cut_request(requests, offsets, P: tl.constexpr, pinned):
    """What program (head, request, layer) is about; distances in units of UNIT bytes."""
    m, count = tl.program_id(1), tl.num_programs(1)
    row, slot = tl.load(requests + m), tl.load(requests + count + m)
    computed = tl.load(requests + 2 * count + m).to(tl.int32)
    before = tl.load(requests + 3 * count + m).to(tl.int32)
    now = tl.load(requests + 4 * count + m).to(tl.int32)
    layer, layers = tl.program_id(2), tl.num_programs(2)
    cache = tl.load(offsets + layer)
    table = tl.load(offsets + layers + layer)
    other = tl.load(offsets + 2 * layers + layer)
    gap = before - pinned
    return row, slot, computed, gap, (pinned + now - before) * P, cache, table, other


@triton.jit
def own_row():
    """The program's row of what is [L, M, HK, ...]."""
    m = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    return (m * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)


@triton.jit
def block_of(table, slot, seen, pinned, gap, P: tl.constexpr):
    """The blocks of held slots."""
    column = slot // P
    column = tl.where(column < pinned, column, column + gap)
    return tl.load(table + column, mask=seen, other=0).to(tl.int64)


@dataclass(frozen=True)
class PagedCuts:
    """M requests to be cut in L layers, whose tensors are alike in shape, strides and dtype.

    caches: [N, HK, P, 2 D] each, keys and then values. tables: int32 [B, columns] each, the blocks
    of requests as they were written. others: rings [S, R, HQ, D], or running sums fp32 [N, HK, P],
    contiguous. offsets: int64 [3, L], from the first layer's tensors to each layer's. requests:
    int64 [5, M], see `of`, on the caches' device. pinned: blocks. width: most candidates of a
    request.
    """

    caches: Sequence[Tensor]
    tables: Sequence[Tensor]
    others: Sequence[Tensor]
    offsets: Tensor
    requests: Tensor
    pinned: int
    width: int

    @classmethod
    def of(
        cls, caches: Sequence[Tensor], tables: Sequence[Tensor], others: Sequence[Tensor],
        requests: Tensor, pinned: int,
    ) -> PagedCuts:  # fmt: skip
        """Cuts of `requests` int64 [5, M] on the CPU: rows of the tables, rows of the rings, tokens
        cached, first recent blocks before and now. One copy goes to the device, unawaited.

        Raises ValueError for layers that differ.
        """
        every = (caches, tables, others)
        for name, tensors in zip(("caches", "tables", "others"), every, strict=True):
            check_alike(name, tensors, len(caches))
        found = [number for tensors in every for number in distances(tensors, UNIT)]
        sent = send(torch.cat([torch.tensor(found), requests.flatten()]), caches[0].device)
        going = int((requests[4] - requests[3]).max())
        many = len(found)
        return cls(
            caches, tables, others, sent[:many].view(3, -1), sent[many:].view(5, -1), pinned,
            (pinned + going) * caches[0].shape[2],
        )  # fmt: skip

    def held(self, layer: int, request: int) -> tuple[Tensor, Tensor]:
        """Blocks and offsets of every slot held, int64 [n] each: for references, it waits."""
        row, _, computed, before, _ = self.requests[:, request].tolist()
        size = self.caches[0].shape[2]
        n = computed - (before - self.pinned) * size
        slot = torch.arange(n, device=self.requests.device)
        column = slot // size
        column = torch.where(column < self.pinned, column, column + before - self.pinned)
        return self.tables[layer][row, column].long(), slot % size

    @property
    def grid(self) -> tuple[int, int, int]:
        """Programs: KV heads, requests, layers."""
        return self.caches[0].shape[1], self.requests.shape[1], len(self.caches)

    def candidates(self) -> Tensor:
        """c of each request, int32 [M]."""
        size = self.caches[0].shape[2]
        return ((self.pinned + self.requests[4] - self.requests[3]) * size).int()

    def empty_scores(self) -> Tensor:
        """fp32 [L, M, HK, width], to be written up to each request's candidates."""
        heads, requests, layers = self.grid
        shape = (layers, requests, heads, self.width)
        return torch.empty(shape, dtype=torch.float32, device=self.caches[0].device)


def cache_strides(cache: Tensor) -> tuple[int, int, int]:
    """Of blocks, heads and tokens; ValueError unless a token's numbers stand side by side."""
    if cache.stride(3) != 1:
        raise ValueError(f"expected caches with stride 1 in the last dim, got {cache.stride()}")
    return cache.stride(0), cache.stride(1), cache.stride(2)


def check_sums(sums: Tensor, cache: Tensor) -> None:
    """ValueError unless these can be the running sums beside `cache`."""
    check_shape("sums", sums, cache.shape[:3])
    check_dtype("sums", sums, torch.float32)
    if not sums.is_contiguous():
        raise ValueError(f"expected contiguous sums, got strides {sums.stride()}")
