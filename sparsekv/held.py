"""The keys that a layer holds, in ascending position: gathered, asked about, and cut down."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsekv.cache.paged import PagedKVCache
from sparsekv.headwise import Keys, Queries, Scores, headwise_attention, headwise_columns
from sparsekv.policies.base import Need
from sparsekv.selection import Kept

_LAST = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class HeldKeys:
    """keys [B, HK, S, D] by position, free slots last; order: their slots, int64 [B, HK, S]."""

    keys: Keys
    order: Tensor

    @classmethod
    def of(cls, store: PagedKVCache, local: int) -> HeldKeys:
        """What layer `local` of a store holds now; nothing waits for the device."""
        positions = store.view(local, "positions")
        slot = torch.arange(positions.shape[-1], device=positions.device)
        in_use = slot < store.seqlens[local][..., None]
        ordered, order = torch.where(in_use, positions, _LAST).sort(dim=-1)
        width = int(store.lens[local].max())
        order = order[..., :width]
        keys = Keys(*store.gather(local, order), ordered[..., :width], store.seqlens[local])
        return cls(keys, order)

    def columns(
        self, queries: Queries, need: Need, scores: Scores, window: int | None, layer: int
    ) -> Tensor:
        """The statistic `need` over queries that need not be those of the last attention."""
        lse = headwise_attention(queries, self.keys, scores, window)[1]
        every = replace(need, rows=None)
        return headwise_columns(queries, self.keys, lse, every, scores, window, layer)


def drop(store: PagedKVCache, local: int, order: Tensor, kept: Kept, trim: bool = True) -> None:
    """Write scores back and compact a layer to `kept`, whose indices run along `order`.

    trim: give back the pages left over.
    """
    if kept.slot_scores is not None:
        by_slot = store.view(local, "scores").scatter(-1, order, kept.slot_scores)
        store.store_scores(local, by_slot)
    if kept.everything:
        return
    index = kept.selection.index
    slots = order.gather(-1, index.clamp_min(0).long())
    votes = torch.zeros_like(store.view(local, "positions"))
    votes.scatter_add_(-1, slots, (index >= 0).int())
    store.compact(local, votes > 0, kept.host)
    if trim:
        store.trim(local)
