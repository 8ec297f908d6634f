"""Prompts: the first forward onto an empty cache, and further tokens onto a filled one.

prefill: dense attention over the fresh K/V, then only what is kept is written (and quantised, if
the cache is: a prompt is attended as the model made it). chunk: append them all, attend by
position, drop down to the budget.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekv.cache.paged import PagedKVCache
from sparsekv.headwise import Keys, Queries, Scores, headwise_attention, headwise_columns
from sparsekv.kernels.column_scores import column_scores
from sparsekv.kernels.prefill import prefill_attention
from sparsekv.policies.base import Need
from sparsekv.selecting import note_keys
from sparsekv.selection import Candidates, Kept, choose
from sparsekv.sinks import shift_sinks
from sparsekv.state import SparseState
from sparsekv.step import Part

_LAST = torch.iinfo(torch.int32).max


def prefill(
    state: SparseState, layer: int, part: Part, q: Tensor, k: Tensor, v: Tensor, scores: Scores
) -> Tensor:
    """Attend a prompt densely and write what the policy keeps; see `sparsekv.attention.attend`."""
    rows = part.on(q.device)
    batch, heads = k.shape[:2]
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    lengths = (rows.cu, rows.cu, part.tokens, part.tokens)
    geometry: dict[str, Any] = {
        "softmax_scale": scores.softmax_scale,
        "softcap": scores.softcap,
        "window": state.layers[layer].window,
        "seqused_q": rows.used,
        "seqused_k": rows.used,
    }
    out, lse = prefill_attention(flat_q, flat_k, flat_v, *lengths, sinks=scores.sinks, **geometry)

    def columns_of(need: Need) -> Tensor:
        return column_scores(
            flat_q, flat_k, lse, *lengths,
            rows=need.rows, statistic=need.statistic, group=need.group, **geometry,
        ).expand(-1, heads, -1)  # fmt: skip

    def fresh() -> Candidates:
        positions = torch.arange(part.tokens, dtype=torch.int32, device=k.device)
        held = rows.used[:, None].expand(batch, heads)
        host = np.repeat(part.lengths[:, None], heads, axis=1)
        return Candidates(positions.expand(batch, heads, -1), held, host, None)

    candidates = part.once(("fresh", k.device, heads), fresh)
    _write_kept(state, layer, part, k, v, choose(state, layer, candidates, columns_of))
    _remember_queries(state, layer, _queries(q, part))
    return out.unflatten(0, (batch, part.tokens))


def _write_kept(
    state: SparseState, layer: int, part: Part, k: Tensor, v: Tensor, kept: Kept
) -> None:
    """Write the kept tokens of a fresh prompt into slots 0, 1, ... of their heads."""
    store, local = state.store(layer)
    if state.policy.ragged:  # else `begin` has found the pages of all layers
        store.ensure(np.array([local]), kept.host[None], np.array([True]))
    index, slot_scores = kept.selection.index, kept.slot_scores
    if slot_scores is not None:
        slot_scores = slot_scores.gather(-1, index.clamp_min(0).long())
    pad = part.on(k.device).pad
    store.append(local, k, v, None, None, index=index, offsets=pad, token_scores=slot_scores)
    store.set_lens(local, kept.selection.count, kept.host)
    note_keys(state, layer, part, k)


def chunk(
    state: SparseState, layer: int, part: Part, q: Tensor, k: Tensor, v: Tensor, scores: Scores
) -> Tensor:
    """Attend the cache and several new tokens, then drop down to the budget."""
    window = state.layers[layer].window
    store, local = state.store(layer)
    _append_chunk(store, local, part, k, v)
    note_keys(state, layer, part, k)
    shift_sinks(state, layer, part)
    order, positions = _position_order(store, local)
    keys = Keys(*store.gather(local, order), positions, store.seqlens[local])
    queries = _queries(q, part)
    out, lse = headwise_attention(queries, keys, scores, window)
    remembered = state.queries.pop(layer, None)

    def columns_of(need: Need) -> Tensor:
        if need.rows is None:
            return headwise_columns(queries, keys, lse, need, scores, window)
        last = _observation_window(queries, remembered, need.rows)
        last_lse = headwise_attention(last, keys, scores, window)[1]
        return headwise_columns(last, keys, last_lse, need, scores, window)

    slot_scores = None
    if state.policy.stateful and layer in state.ordinal:
        slot_scores = store.view(local, "scores").gather(-1, order)
    host = store.lens[local]
    candidates = Candidates(positions, keys.held, host, slot_scores)
    _drop(store, local, order, choose(state, layer, candidates, columns_of))
    _remember_queries(state, layer, queries, remembered)
    return out


def _append_chunk(store: PagedKVCache, local: int, part: Part, k: Tensor, v: Tensor) -> None:
    """Append every real token of a chunk, for a moment over budget."""
    rows = part.on(k.device)
    host = store.lens[local] + part.lengths[:, None].astype(np.int32)
    store.ensure(np.array([local]), (host - store.lens[local])[None], np.array([True]))
    lens, positions = store.seqlens[local], _positions(part, k.device)[:, None]
    first = lens[..., None] - rows.before[:, None, None]  # slot of the token at position 0
    slots = torch.where(positions >= 0, first + positions, -1)
    store.append(local, k, v, slots, positions.expand_as(slots))
    store.set_lens(local, lens + rows.used[:, None], host)


def _queries(q: Tensor, part: Part) -> Queries:
    """All T queries of a part with their positions."""
    return Queries(q, _positions(part, q.device), part.on(q.device).used)


def _positions(part: Part, device: torch.device) -> Tensor:
    """Positions of the tokens of a part, int32 [B, T]; padding sits at -1."""
    rows = part.on(device)
    rank = torch.arange(part.tokens, dtype=torch.int32, device=device) - rows.pad[:, None]
    return torch.where(rank >= 0, rank + rows.before[:, None], -1)


def _position_order(store: PagedKVCache, local: int) -> tuple[Tensor, Tensor]:
    """Slots in ascending position, int64 [B, HK, S], and those positions; free slots come last."""
    positions = store.view(local, "positions")
    slot = torch.arange(positions.shape[-1], device=positions.device)
    in_use = slot < store.seqlens[local][..., None]
    ordered, order = torch.where(in_use, positions, _LAST).sort(dim=-1)
    width = int(store.lens[local].max())
    return order[..., :width], ordered[..., :width]


def _drop(store: PagedKVCache, local: int, order: Tensor, kept: Kept) -> None:
    """Write scores back and compact the layer to `kept`, whose indices run along `order`."""
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
    store.trim(local)


def _remember_queries(
    state: SparseState,
    layer: int,
    queries: Queries,
    remembered: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Keep the last queries of this forward for a chunk that may follow."""
    ordinal = state.ordinal.get(layer)
    need = None if ordinal is None else state.policy.needs(ordinal, "prefill")
    if state.keep_queries and need is not None and need.rows is not None:
        last = _observation_window(queries, remembered, need.rows)
        state.queries[layer] = (last.q, last.positions)


def _observation_window(
    queries: Queries, remembered: tuple[Tensor, Tensor] | None, rows: int
) -> Queries:
    """The last `rows` real queries of remembered and new ones; missing ones sit at -1."""
    q, positions = queries.q, queries.positions
    if remembered is not None:
        q = torch.cat([remembered[0], q], dim=2)
        positions = torch.cat([remembered[1], positions], dim=1)
    positions, order = positions.sort(dim=-1, stable=True)
    order = order[:, None, -rows:, None].expand(-1, q.shape[1], -1, q.shape[-1])
    positions = positions[:, -rows:]
    return Queries(q.gather(2, order), positions, (positions >= 0).sum(-1, dtype=torch.int32))
