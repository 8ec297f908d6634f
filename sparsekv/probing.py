"""Tokens that pass over a cached context without being stored, to see which keys they need (KVzip).

They attend the whole context of one row and one another. What is scored is another softmax of the
same queries, over the sinks, the part of the context that they repeat, and themselves. Afterwards
the best keys of all layers and heads stay, and the pages of the others are given back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekv.cache.pages import upload
from sparsekv.device import device_of
from sparsekv.headwise import Keys, Queries, Scores, headwise_attention
from sparsekv.kernels.column_scores import column_scores
from sparsekv.kernels.prefill import prefill_attention
from sparsekv.kernels.topk import select_topk
from sparsekv.state import SparseState


@dataclass
class Probe:
    """One pass over row `row` of a state, which scores its tokens start .. stop - 1.

    sinks: tokens at the start that every softmax sees. found: fp32 [HK, T] a governed layer, which
    passes over the parts of a row fill in.
    """

    state: SparseState
    row: int
    start: int
    stop: int
    sinks: int
    found: dict[int, Tensor]
    _lengths: dict[Any, Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of the row that are cached."""
        return int(self.state.tokens[self.row])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        """Attention of the pass's tokens, q [1, HQ, m, D], k, v [1, HK, m, D] -> [1, m, HQ, D]."""
        if layer not in self.state.ordinal:
            return self._attend_window(layer, q, k, v, scores)
        old_k, old_v = self._context(layer)
        own = [x[0].transpose(0, 1) for x in (q, k, v)]  # [m, H, D]
        keys, values = (
            torch.cat([old.transpose(0, 1), new])
            for old, new in zip((old_k, old_v), own[1:], strict=True)
        )
        out, _ = prefill_attention(own[0], keys, values, *self._over(keys, own[0]), **_how(scores))
        chosen = (slice(self.sinks), slice(self.start, self.stop), slice(self.tokens, None))
        near_k, near_v = (torch.cat([x[part] for part in chosen]) for x in (keys, values))
        lengths = self._over(near_k, own[0])
        _, lse = prefill_attention(own[0], near_k, near_v, *lengths, **_how(scores))
        how = _how(scores)
        del how["sinks"]  # they are in the lse
        columns = column_scores(own[0], near_k, lse, *lengths, statistic="max", group="max", **how)[
            0
        ]
        width = self.stop - self.start
        self.found[layer][:, self.start : self.stop] = columns[:, self.sinks : self.sinks + width]
        return out[None]

    def _context(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of the row's cached tokens by slot, [HK, n, D]."""
        store, local = self.state.store(layer)
        size, count = store.pool.page_size, int(store.lens[local, self.row].max())
        slot = torch.arange(count, device=store.seqlens.device)
        page = store.block_table[local, self.row].long()[:, slot // size]
        return store.pool.read(page, (slot % size).expand_as(page))

    def _attend_window(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        """A sliding layer holds its newest tokens, in any order: visibility goes by position."""
        store, local = self.state.store(layer)
        old_k, old_v = self._context(layer)
        count, own = old_k.shape[1], k.shape[2]
        at = torch.arange(own, dtype=torch.int32, device=k.device)[None] + self.tokens
        places = store.view(local, "positions")[self.row : self.row + 1, :, :count]
        positions = torch.cat([places, at[:, None].expand(1, places.shape[1], -1)], dim=-1)
        keys, values = (torch.cat([old[None], new], 2) for old, new in ((old_k, k), (old_v, v)))
        held = torch.full_like(positions[..., 0], count + own)
        queries = Queries(q, at, held[:, 0] - count)
        window = self.state.layers[layer].window
        return headwise_attention(queries, Keys(keys, values, positions, held), scores, window)[0]

    def _over(self, keys: Tensor, q: Tensor) -> tuple[Tensor, Tensor, int, int]:
        """One sequence of queries over one of keys, as the kernels want it said."""
        counts = (len(q), len(keys))
        if (q.device, counts) not in self._lengths:
            ends = np.array([[0, count] for count in counts], dtype=np.int32)
            self._lengths[q.device, counts] = upload(ends, q.device)
        return (*self._lengths[q.device, counts], *counts)


def _how(scores: Scores) -> dict[str, Any]:
    return {
        "softmax_scale": scores.softmax_scale,
        "softcap": scores.softcap,
        "sinks": scores.sinks,
    }


def keep_best(scores: Tensor, budget: int, sinks: int, uniform: bool) -> Tensor:
    """Which keys stay: bool as scores fp32 [L, HK, T], T > budget.

    uniform: the best `budget` of each head. Otherwise the best L * HK * budget of all; equal ones
    go by token, the newest first, then the first layer and head. The first `sinks` tokens stay
    anyway, as far as the budget reaches.
    """
    layers, heads, tokens = scores.shape
    first = torch.arange(tokens, device=scores.device) < min(sinks, budget)
    # Lists in which the highest index wins a tie.
    lists = scores.flatten(0, 1)
    lists = lists if uniform else lists.flip(0).T.reshape(1, -1)
    safe = first.expand_as(lists) if uniform else first.repeat_interleave(layers * heads)[None]
    length = torch.full(lists.shape[:1], lists.shape[1], dtype=torch.int32, device=scores.device)
    share = budget if uniform else budget * layers * heads
    index, _ = select_topk(lists.contiguous(), length, share, protected=safe.contiguous())
    keep = torch.zeros(lists.shape, dtype=torch.bool, device=scores.device)
    keep.scatter_(1, index.long(), True)
    if uniform:
        return keep.view_as(scores)
    return keep.view(tokens, layers * heads).T.flip(0).view_as(scores)


def drop_keys(state: SparseState, keep: Sequence[Mapping[int, Tensor] | None]) -> None:
    """Drop cached tokens and give their memory back.

    keep: a row's None (all stay) or by layer bool [HK, T] over its slots. Waits for the device.
    """
    for layer in state.ordinal:
        store, local = state.store(layer)
        slots = int(store.lens[local].max())
        marks = torch.ones(*store.lens.shape[1:], slots, dtype=torch.bool, device=store.pool.device)
        for row, kept in enumerate(keep):
            if kept is not None:
                marks[row, :, : kept[layer].shape[-1]] = kept[layer].to(marks.device)
        with device_of(marks):
            store.compact(local, marks, None)
        store.trim(local)
    for store in state.stores:
        store.shrink()
