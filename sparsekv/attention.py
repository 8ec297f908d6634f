"""One layer, one forward: append -> attend -> observe -> select -> compact.

The only file that knows this order. Three cases, as `SparseState.begin` sorts them:

prefill  nothing cached: dense attention over the fresh K/V, then only what is kept is written
         (and quantised, if the cache is: a prompt is attended as the model made it);
chunk    several tokens onto a cache: append them all, attend by position, drop down to the budget;
decode   one token: append or replace a slot, paged attention, drop at most one slot.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekv.cache.paged import PagedKVCache
from sparsekv.headwise import Keys, Queries, Scores, headwise_attention, headwise_columns
from sparsekv.kernels.column_scores import column_scores
from sparsekv.kernels.decode import paged_decode_attention
from sparsekv.kernels.evict import Action, evict_slot
from sparsekv.kernels.prefill import prefill_attention
from sparsekv.policies.base import Need
from sparsekv.selection import Candidates, Kept, choose
from sparsekv.state import SparseState
from sparsekv.step import Part

_LAST = torch.iinfo(torch.int32).max


def attend(
    state: SparseState,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scores: Scores,
) -> Tensor:
    """Attention of T new tokens over what `layer` keeps, then eviction.

    q [B, HQ, T, D], k and v [B, HK, T, D] after RoPE; mask: 2-D padding mask over all columns seen
    so far and these T, or None. Returns [B, T, HQ, D]; rows of padding are 0.

    Raises:
        ValueError: see `SparseState.begin`.
    """
    outs = []
    parts = state.begin(layer, q, k, mask)
    with _device_of(q):
        for part in parts:
            at = slice(part.start - parts[0].start, part.start - parts[0].start + part.tokens)
            run = {"prefill": _prefill, "chunk": _chunk, "decode": _decode}[part.kind]
            outs.append(run(state, layer, part, q[:, :, at], k[:, :, at], v[:, :, at], scores))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def rollback(state: SparseState, tokens: int) -> None:
    """Take back the last `tokens` columns of a recorded round and accept the others.

    The layers return to their snapshot and replay the accepted tokens, so that slots, scores and
    evictions are those of a run that never saw the rejected ones.

    Raises:
        ValueError: more tokens than were recorded since the last call.
    """
    if tokens:
        recorded = min(len(state.log.get(layer, ())) for layer in range(len(state.layers)))
        if tokens > recorded:
            raise ValueError(
                f"expected to crop at most the {recorded} tokens recorded since the last crop "
                f"(activate_past_recording() starts recording), got {tokens}"
            )
        for layer, log in state.rewind(tokens).items():
            for part, q, k, v, scores in log:
                with _device_of(q):
                    _decode(state, layer, part, q, k, v, scores)
    state.settle()


def _device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the one of this layer."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


# ---------------------------------------------------------------------- prefill


def _prefill(
    state: SparseState, layer: int, part: Part, q: Tensor, k: Tensor, v: Tensor, scores: Scores
) -> Tensor:
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


# ---------------------------------------------------------------------- chunk


def _chunk(
    state: SparseState, layer: int, part: Part, q: Tensor, k: Tensor, v: Tensor, scores: Scores
) -> Tensor:
    window = state.layers[layer].window
    store, local = state.store(layer)
    _append_chunk(store, local, part, k, v)
    _shift_sinks(state, layer, part)
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


# ---------------------------------------------------------------------- observation window


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


# ---------------------------------------------------------------------- decode


def _decode(
    state: SparseState, layer: int, part: Part, q: Tensor, k: Tensor, v: Tensor, scores: Scores
) -> Tensor:
    store, local = state.store(layer)
    pool, spec = store.pool, state.layers[layer]
    if state.recording:
        state.open_round(layer)  # remembers the queries that go below
        state.log[layer].append((part, q, k, v, scores))
        store.ensure(np.array([local]), np.ones_like(store.lens[:1]), state.rewrites[[layer]])
    state.queries.pop(layer, None)
    _append_token(state, layer, part, k, v)
    _shift_sinks(state, layer, part)
    ordinal = state.ordinal.get(layer)
    need = None if ordinal is None else state.policy.needs(ordinal, "decode")
    group = None if need is None else ("mean" if need.group == "layer_mean" else need.group)
    out, _, probs = paged_decode_attention(
        q[:, :, 0], pool.k_pages, pool.v_pages, store.block_table[local], store.seqlens[local],
        softmax_scale=scores.softmax_scale, softcap=scores.softcap, sinks=scores.sinks,
        window=spec.window, positions=pool.positions if spec.window else None,
        q_positions=part.on(q.device).before if spec.window else None, probs=group,
        k_scales=pool.k_scales, v_scales=pool.v_scales,
    )  # fmt: skip
    if need is not None and need.group == "layer_mean" and probs is not None:
        probs = probs.mean(1, keepdim=True).expand_as(probs)
    _settle_token(state, layer, part, probs)
    return out[:, None]


def _append_token(state: SparseState, layer: int, part: Part, k: Tensor, v: Tensor) -> None:
    """Append the token to each head, or let it take the slot of the head's victim."""
    assert state.limits is not None
    store, local = state.store(layer)
    lens, host = store.seqlens[local], store.lens[local] + 1
    slots = None
    if state.limits.mode[layer] == "replace":
        host = np.minimum(host, state.limits.budget[layer][:, None])
        if state.steady or (host == store.lens[local]).any():
            slots = _evict(state, layer, part, "replace")  # counts the token, too
    positions = part.on(k.device).before[:, None, None].expand(*lens.shape, 1)
    if slots is None:
        store.append(local, k, v, None, positions, count=True)
    else:
        store.append(local, k, v, slots[..., None], positions)
    store.lens[local] = host


def _settle_token(state: SparseState, layer: int, part: Part, probs: Tensor | None) -> None:
    """Fold the step's probabilities into the scores; drop a slot where budget + 1 are attended."""
    assert state.limits is not None
    store, local = state.store(layer)
    limit = state.limits.budget[layer][:, None]
    drop = state.limits.mode[layer] == "evict"
    drop = drop and (bool(state.steady) or bool((store.lens[local] > limit).any()))
    decay = None if probs is None else state.policy.decay(state.ordinal[layer])
    if probs is not None and decay is None:
        old, positions = store.view(local, "scores"), store.view(local, "positions")
        columns = probs[..., : old.shape[-1]]
        new = state.policy.observe(state.ordinal[layer], "decode", old, columns, positions)
        store.store_scores(local, new)
        probs = None
    if drop or probs is not None:
        _evict(state, layer, part, "drop" if drop else "observe", probs, decay)
    if drop:
        store.lens[local] = np.minimum(store.lens[local], limit)


def _evict(
    state: SparseState,
    layer: int,
    part: Part,
    action: Action,
    probs: Tensor | None = None,
    decay: float | None = None,
) -> Tensor | None:
    """`evict_slot` on a layer under its limits."""
    assert state.limits is not None
    store, local = state.store(layer)
    pool, lens = store.pool, store.seqlens[local]
    budget, sinks, recent = state.limits.on(lens.device, layer)
    governed = layer in state.ordinal  # a sliding layer gives up its oldest token
    return evict_slot(
        pool.k_pages, pool.v_pages, pool.positions, pool.scores,
        store.block_table[local, :, :, : store.width(local)], lens,
        action=action, by=state.policy.evicts_by if governed else "position",
        current=part.on(lens.device).before, budget=budget, sinks=sinks, recent=recent,
        probs=probs, decay=1.0 if decay is None else decay,
        k_scales=pool.k_scales, v_scales=pool.v_scales,
    )  # fmt: skip


def _shift_sinks(state: SparseState, layer: int, part: Part) -> None:
    """StreamingLLM's contiguous positions: move the sink keys next to the recent ones.

    Sinks hold the first slots of every head and nothing moves them. Their true keys are put aside
    while nothing is evicted yet, so that rounding does not add up over the steps.
    """
    shift = state.sink_shift
    if shift is None or layer not in state.ordinal:
        return
    store, local = state.store(layer)
    count = min(shift.sinks, store.width(local) * store.pool.page_size)
    slots = torch.arange(count, device=store.seqlens.device)
    order = slots.expand(*store.seqlens[local].shape, -1)
    now = store.gather(local, order)[0]
    rows = part.on(slots.device)
    delta = rows.before + rows.used - store.seqlens[local][:, 0]  # tokens evicted in between
    moved = (delta > 0)[:, None, None, None]
    old = state.true_sinks.get(layer, now)[:, :, :count]
    true = torch.where(moved, torch.cat([old, now[:, :, old.shape[2] :]], dim=2), now)
    if state.steady and layer in state.true_sinks and old.shape == true.shape:
        old.copy_(true)  # a captured step reads the memory it was captured with
    else:
        state.true_sinks[layer] = true
    _, sinks, _ = state.limits.on(slots.device, layer)  # type: ignore[union-attr]
    moved = moved & (slots < sinks[:, None])[:, None, :, None]
    store.write_keys(local, order, shift.rotate(true, delta), moved)
