"""Which tokens a layer pins, and the move: policy scores, each KV head for itself.

When blocks leave the recent part, their tokens and the pinned ones are candidates for the pinned
blocks, where the best stay: the same number in each KV head, another choice. With R the newest
queries, those of the last tokens held, and A the softmax over all n tokens held:

    score_j = pool( reduce_{h in group} sum_{i in last R} A_hij )        candidates j; [HK, n]

"layer_mean" averages over all HQ heads: the layer's KV heads then keep the same tokens.

At the end of a prompt all of it is held, so these are SnapKV's scores; later they are a window sum
over what is left. Candidates are older than the R queries, so every query sees every candidate.
Slots stay in order of position: kept ones move up, never past each other.

Everything is sized by counts that the host has: on a GPU nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from sparsekv.kernels._common import send
from sparsekv.kernels.column_scores import column_scores
from sparsekv.kernels.prefill import prefill_attention
from sparsekv.kernels.topk import select_topk
from sparsekv.policies import H2O, TOVA
from sparsekv.policies.base import pool_columns
from sparsekv.vllm.layout import Ints, Layout
from sparsekv.vllm.rows import Step
from sparsekv.vllm.settings import Settings

MAX_TOKENS = 1 << 16  # keys copied out of a layer at a time, unless one request alone has more


@dataclass(frozen=True)
class Scorer:
    """How queries vote: the newest `rows`, reduced over the heads of a `group`, then pooled.

    rows = 0: all there ever were, by the running sums of `sums`.
    """

    rows: int
    group: Literal["mean", "max", "sum", "layer_mean"]
    pool: str = "none"
    kernel: int = 1

    @classmethod
    def of(cls, settings: Settings) -> Scorer | None:
        """The scorer of the user's policy; None if it looks at no score."""
        method: Any = settings.method
        if not settings.scored:
            return None
        if isinstance(method, TOVA):
            return cls(settings.rows, "layer_mean")
        if isinstance(method, H2O):
            return cls(settings.rows, method.group)
        return cls(settings.rows, method.group, method.pool, method.kernel)


class BlockAccess(Protocol):
    """Reads and moves tokens inside a layer's cache, whatever its blocks look like."""

    def keys(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """The keys of blocks [m], in order, [m * block_size, HK, D]."""

    def move(self, cache: Tensor, blocks: Tensor, offsets: Tensor, target: Tensor) -> None:
        """Copy K tokens a head, at blocks and offsets [M, HK, K], into blocks target [M, P]."""


@dataclass(frozen=True)
class Cut:
    """M requests whose blocks must go, on the device of the cache.

    held: int64 [blocks], every block that they hold, request by request. starts: int32 [M + 1] in
    tokens of `held`; used: int32 [M], tokens of each that are there; candidates: int32 [M].
    places: int64 [M, R] of the queries in the ring of `slots` int64 [M]. longest: max of used.
    """

    held: Tensor
    starts: Tensor
    used: Tensor
    candidates: Tensor
    slots: Tensor
    places: Tensor
    longest: int


def cuts(step: Step, layout: Layout, table: Tensor, rows: int) -> Iterator[Cut]:
    """The cuts that a step asks for, at most MAX_TOKENS tokens at a time; table int32 [B, M]."""
    size, pinned = layout.block_size, layout.pinned_blocks
    blocks = -(-step.computed // size) - (step.before - pinned)
    batch: list[int] = []
    for row in step.moving.tolist():
        if batch and int(blocks[[*batch, row]].sum()) * size > MAX_TOKENS:
            yield _cut(step, layout, table, rows, np.array(batch))
            batch = []
        batch.append(row)
    if batch:
        yield _cut(step, layout, table, rows, np.array(batch))


def _cut(step: Step, layout: Layout, table: Tensor, rows: int, moving: Ints) -> Cut:
    size, pinned = layout.block_size, layout.pinned_blocks
    before, now, computed = step.before[moving], step.now[moving], step.computed[moving]
    ends = -(-computed // size)
    columns = [np.r_[0:pinned, b:e] for b, e in zip(before, ends, strict=True)]
    counts = np.array([len(c) for c in columns])
    used = computed - (before - pinned) * size
    places = (computed[:, None] - rows + np.arange(rows)) % rows
    parts = [
        np.repeat(moving, counts), np.concatenate(columns), np.r_[0, np.cumsum(counts)] * size,
        used, (pinned + now - before) * size, step.slots[moving], places.ravel(),
    ]  # fmt: skip
    sent = send(torch.from_numpy(np.concatenate(parts)), table.device)
    row, column, starts, held, candidates, slots, at = sent.split([len(p) for p in parts])
    return Cut(
        table[row, column].long(), starts.int(), held.int(), candidates.int(), slots,
        at.view(len(moving), rows), int(used.max()),
    )  # fmt: skip


def best_slots(
    queries: Tensor, keys: Tensor, cut: Cut, keep: int, scorer: Scorer, scale: float,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """The `keep` best candidates of each request, ascending slots, int64 [M, HK, keep].

    queries [M, R, HQ, D]: of the last R tokens held; keys [blocks * size, HK, D] of `cut.held`.
    """
    requests, rows = queries.shape[:2]
    starts_q = torch.arange(0, (requests + 1) * rows, rows, dtype=torch.int32, device=keys.device)
    packed = (starts_q, cut.starts, rows, cut.longest)
    q = queries.flatten(0, 1)
    same: dict[str, Any] = {"softmax_scale": scale, "softcap": softcap, "seqused_k": cut.used}
    _, lse = prefill_attention(q, keys, keys, *packed, **same)  # only the lse is wanted
    columns = column_scores(q, keys, lse, *packed, group=scorer.group, **same)
    heads = columns.shape[1]  # HK choices, or the one of all heads
    lengths = cut.candidates[:, None].expand(-1, heads)
    scores = pool_columns(columns, scorer.kernel, scorer.pool, lengths)
    index, _ = select_topk(scores.flatten(0, 1).contiguous(), lengths.flatten(), keep)
    return index.view(requests, heads, keep).long().expand(-1, keys.shape[1], -1)


def apply(
    cut: Cut, cache: Tensor, ring: Tensor, access: BlockAccess, layout: Layout, scorer: Scorer,
    scale: float, softcap: float | None,
) -> None:  # fmt: skip
    """Pin the best tokens of the cut's requests in one layer, in place.

    ring [slots, R, HQ, D]: the newest queries; see `rows.store_queries`.
    """
    queries = ring[cut.slots[:, None], cut.places]
    keys = access.keys(cache, cut.held).to(queries.dtype)
    size, keep = layout.block_size, layout.pinned_blocks * layout.block_size
    slots = best_slots(queries, keys, cut, keep, scorer, scale, softcap)
    first = (cut.starts[:-1] // size).long()  # of each request in cut.held
    blocks = cut.held[first[:, None, None] + slots // size]
    pinned = torch.arange(layout.pinned_blocks, device=first.device)
    access.move(cache, blocks, slots % size, cut.held[first[:, None] + pinned])
