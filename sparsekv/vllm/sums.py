"""H2O's running sums: what every query so far gave to each token held, beside a layer's cache.

    sums[block, h, offset] += sum_i reduce_{g in group} A_hgij      queries i of a step; A over all
                                                                    tokens held, j at that place

fp32 [N, HK, block_size]. A token's place starts from 0 in the step that writes the token, whatever
request had the block before. While a prompt is held whole, rows of a chunk see all older keys: its
sums do not depend on its chunks. Where blocks must go, pinned tokens and those leaving compete by
their sums, which move with the keys.

Groups of layers share the memory of their caches, and a block belongs to one of them at a time: the
layers of one cache share their sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekv.kernels._common import send
from sparsekv.kernels.column_scores import column_scores
from sparsekv.kernels.prefill import prefill_attention
from sparsekv.kernels.topk import select_topk
from sparsekv.vllm.compaction import MAX_TOKENS, BlockAccess, Cut, Scorer
from sparsekv.vllm.layout import Ints, Layout


def sums_of(name: str, layers: Mapping[str, Any]) -> Tensor:
    """The sums beside the cache of layer `name`; new ones, 0, where that cache has none yet."""
    cache = layers[name].kv_cache
    for layer in layers.values():
        sums = getattr(getattr(layer, "impl", None), "sums", None)
        if sums is not None and sums.shape == cache.shape[:3] and _same(layer.kv_cache, cache):
            return sums
    return torch.zeros(cache.shape[:3], dtype=torch.float32, device=cache.device)


def provide_sums(names: list[str], layers: Mapping[str, Any]) -> None:
    """Give these layers sums where their caches are new: vLLM may make some to measure memory."""
    for name in names:
        impl, cache = layers[name].impl, layers[name].kv_cache
        if impl.sums is None or impl.sums_at != (cache.data_ptr(), *cache.shape):
            impl.sums, impl.sums_at = None, (cache.data_ptr(), *cache.shape)
            impl.sums = sums_of(name, layers)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


@dataclass(frozen=True)
class Reading:
    """N requests of which all queries of a step are added up, on the device of the cache.

    tokens: int64 [Tq], their rows of the query tensor; starts_q, starts_k, used: int32 [N + 1],
    [N + 1], [N], as of packed sequences. held: int64 [blocks], every block that they hold, request
    by request; request, place: int64 [blocks], whose block and its how manieth it is; older: int64
    [blocks], the first place in each that was not there before. longest_q, longest_k: maxima, the
    latter in whole blocks.
    """

    tokens: Tensor
    starts_q: Tensor
    starts_k: Tensor
    used: Tensor
    held: Tensor
    request: Tensor
    place: Tensor
    older: Tensor
    longest_q: int
    longest_k: int


def readings(
    rows: Ints, query_start: Ints, lengths: Ints, table: Tensor, size: int
) -> Iterator[Reading]:
    """The readings of these rows; at most MAX_TOKENS columns at a time, unless one row has more.

    query_start [B + 1]; lengths [B], tokens held, the step's among them; table int32 [B, M].
    """
    batch: list[int] = []
    for row in rows.tolist():
        longest = int(lengths[[*batch, row]].max())
        if batch and longest * (len(batch) + 1) > MAX_TOKENS:
            yield _reading(np.array(batch), query_start, lengths, table, size)
            batch = []
        batch.append(row)
    if batch:
        yield _reading(np.array(batch), query_start, lengths, table, size)


def _reading(rows: Ints, query_start: Ints, lengths: Ints, table: Tensor, size: int) -> Reading:
    counts, used = np.diff(query_start)[rows], lengths[rows]
    blocks = -(-used // size)
    place = np.concatenate([np.arange(n) for n in blocks])
    request = np.repeat(np.arange(len(rows)), blocks)
    tokens = np.concatenate(
        [query_start[r] + np.arange(n) for r, n in zip(rows, counts, strict=True)]
    )
    older = np.clip((used - counts)[request] - place * size, 0, size)
    starts_q, starts_k = np.r_[0, np.cumsum(counts)], np.r_[0, np.cumsum(blocks)] * size
    parts = [tokens, starts_q, starts_k, used, rows[request], request, place, older]
    sent = send(torch.from_numpy(np.concatenate(parts)), table.device)
    tok, sq, sk, use, row, req, at, old = sent.split([len(p) for p in parts])
    return Reading(
        tok, sq.int(), sk.int(), use.int(), table[row, at].long(), req, at, old,
        int(counts.max()), int(blocks.max()) * size,
    )  # fmt: skip


@dataclass(frozen=True)
class Adder:
    """A step's prompts, for each layer of a group in its forward pass; fields: see `readings`.

    The table is read by the first of them: until then it may be a place to be filled.
    """

    rows: Ints
    query_start: Ints
    lengths: Ints
    table: Tensor
    size: int
    access: BlockAccess
    scorer: Scorer

    @cached_property
    def readings(self) -> tuple[Reading, ...]:
        """All of them; to be asked for when the table has been filled."""
        parts = (self.rows, self.query_start, self.lengths, self.table, self.size)
        return tuple(readings(*parts))

    def add(self, query: Tensor, cache: Tensor, impl: Any) -> None:
        """Add up in `impl.sums`; query [>= tokens, HQ, D], the step's tokens in the cache."""
        softcap = impl.logits_soft_cap or None
        for reading in self.readings:
            add_reading(
                reading, query, cache, impl.sums, self.access, self.scorer, impl.scale, softcap
            )


def add_reading(
    reading: Reading, query: Tensor, cache: Tensor, sums: Tensor, access: BlockAccess,
    scorer: Scorer, scale: float, softcap: float | None,
) -> None:  # fmt: skip
    """Add what the reading's queries attend to, in place; query [>= tokens, HQ, D]."""
    size = sums.shape[2]
    q = query[reading.tokens]
    keys = access.keys(cache, reading.held).to(q.dtype)
    packed = (reading.starts_q, reading.starts_k, reading.longest_q, reading.longest_k)
    same: dict[str, Any] = {"softmax_scale": scale, "softcap": softcap, "seqused_k": reading.used}
    _, lse = prefill_attention(q, keys, keys, *packed, **same)  # only the lse is wanted
    columns = column_scores(q, keys, lse, *packed, group=scorer.group, **same)  # [N, HK, longest]
    new = columns.unflatten(2, (-1, size))[reading.request, :, reading.place]  # [blocks, HK, size]
    was_there = torch.arange(size, device=sums.device) < reading.older[:, None]
    new += torch.where(was_there[:, None], sums[reading.held], 0.0)
    sums[reading.held] = new


def apply_sums(
    cut: Cut, cache: Tensor, sums: Tensor, access: BlockAccess, layout: Layout
) -> None:  # fmt: skip
    """Pin the tokens with the largest sums of the cut's requests in one layer, in place."""
    size, keep, requests = (
        layout.block_size,
        layout.pinned_blocks * layout.block_size,
        len(cut.used),
    )
    heads = sums.shape[1]
    first = (cut.starts[:-1] // size).long()  # of each request in cut.held
    index = first[:, None] + torch.arange(-(-cut.longest // size), device=first.device)
    blocks = cut.held[index.clamp(max=len(cut.held) - 1)]  # [M, n], beyond a request: another's
    scores = sums[blocks].transpose(1, 2).flatten(2).flatten(0, 1).contiguous()  # [M HK, n size]
    lengths = cut.candidates[:, None].expand(-1, heads).flatten()
    slots = select_topk(scores, lengths, keep)[0].view(requests, heads, keep).long()
    source = cut.held[first[:, None, None] + slots // size]
    target = cut.held[first[:, None] + torch.arange(layout.pinned_blocks, device=first.device)]
    access.move(cache, source, slots % size, target)
    kept = sums[source, torch.arange(heads, device=first.device)[:, None], slots % size]
    sums[target] = kept.unflatten(2, (-1, size)).transpose(1, 2)
