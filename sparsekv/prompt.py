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
from sparsekv.features import Source, compute
from sparsekv.headwise import Keys, Queries, Scores, headwise_attention, headwise_columns
from sparsekv.held import HeldKeys, drop
from sparsekv.kernels.prefill import prefill_attention
from sparsekv.moments import PromptMoments
from sparsekv.policies.base import Need
from sparsekv.policies.features import ExpectedProbability, Feature
from sparsekv.ring import QueryRing, window_rows
from sparsekv.selecting import note_keys
from sparsekv.selection import Candidates, Kept, choose
from sparsekv.sinks import shift_sinks
from sparsekv.state import SparseState
from sparsekv.statistics import Lengths, statistic
from sparsekv.step import Part

Remembered = tuple[Tensor, Tensor] | None  # queries and their positions


def prefill(
    state: SparseState, layer: int, part: Part, q: Tensor, k: Tensor, v: Tensor, scores: Scores
) -> Tensor:
    """Attend a prompt densely and write what the policy keeps; see `sparsekv.attention.attend`."""
    out, lse = attend_prompt(part, q, k, v, scores, state.layers[layer].window)
    keep_prompt(state, layer, part, q, k, v, scores, lse)
    return out


def attend_prompt(
    part: Part, q: Tensor, k: Tensor, v: Tensor, scores: Scores, window: int | None
) -> tuple[Tensor, Tensor]:
    """Dense attention of a prompt: out [B, T, HQ, D] and lse fp32 [HQ, B * T]."""
    lengths, geometry = _packed(part, q.device, scores, window)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    out, lse = prefill_attention(
        flat[0], flat[1], flat[2], *lengths, sinks=scores.sinks, **geometry
    )
    return out.unflatten(0, (len(q), part.tokens)), lse


def keep_prompt(
    state: SparseState,
    layer: int,
    part: Part,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    lse: Tensor,
) -> None:
    """Write what the policy keeps of a prompt that has been attended; lse of `attend_prompt`."""
    rows = part.on(q.device)
    batch, heads = k.shape[:2]

    def columns_of(need: Need) -> Tensor:
        lengths, geometry = _packed(part, q.device, scores, state.layers[layer].window)
        flat_q, flat_k = (x.transpose(1, 2).flatten(0, 1) for x in (q, k))
        own = state.ordinal[layer]
        return statistic(
            need, flat_q, flat_k, lse, lengths, lambda: _positions(part, q.device) + 1, own,
            geometry,
        ).expand(-1, heads, -1)  # fmt: skip

    def fresh() -> Candidates:
        positions = torch.arange(part.tokens, dtype=torch.int32, device=k.device)
        held = rows.used[:, None].expand(batch, heads)
        host = np.repeat(part.lengths[:, None], heads, axis=1)
        return Candidates(positions.expand(batch, heads, -1), held, host, None)

    candidates = part.once(("fresh", k.device, heads), fresh)
    queries = _queries(q, part)
    keys = Keys(k, v, queries.positions[:, None].expand(-1, heads, -1), candidates.held)
    asked = _Asked(state, layer, part, queries, keys, scores, part.tokens - part.lengths)
    kept = choose(state, layer, candidates, columns_of, asked.feature)
    _write_kept(state, layer, part, k, v, kept)
    asked.remember()


def _packed(
    part: Part, device: torch.device, scores: Scores, window: int | None
) -> tuple[Lengths, dict[str, Any]]:
    """The rows of a prompt as sequences of a flat [B * T] axis, as the kernels want it said."""
    rows = part.on(device)
    geometry = {
        "softmax_scale": scores.softmax_scale,
        "softcap": scores.softcap,
        "window": window,
        "seqused_q": rows.used,
        "seqused_k": rows.used,
    }
    return (rows.cu, rows.cu, part.tokens, part.tokens), geometry


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
    held, queries = HeldKeys.of(store, local), _queries(q, part)
    out, lse = headwise_attention(queries, held.keys, scores, window)
    asked = _Asked(state, layer, part, queries, held.keys, scores, np.zeros_like(part.lengths))

    def columns_of(need: Need) -> Tensor:
        own = state.ordinal[layer]
        if need.rows is None:
            return headwise_columns(queries, held.keys, lse, need, scores, window, own)
        return held.columns(asked.last(need.rows), need, scores, window, own)

    slot_scores = None
    if state.policy.stateful and layer in state.ordinal:
        slot_scores = store.view(local, "scores").gather(-1, held.order)
    candidates = Candidates(held.keys.positions, held.keys.held, store.lens[local], slot_scores)
    kept = choose(state, layer, candidates, columns_of, asked.feature)
    drop(store, local, held.order, kept, trim=not part.more)  # the next part wants the pages again
    asked.remember()
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

    def positions() -> Tensor:
        rank = torch.arange(part.tokens, dtype=torch.int32, device=device) - rows.pad[:, None]
        return torch.where(rank >= 0, rank + rows.before[:, None], -1)

    return part.once(("positions", device), positions)


def _remembered(state: SparseState, layer: int, part: Part) -> Remembered:
    """The last queries before this part, as far as anybody wanted them."""
    ring = state.rings.pop(layer, None)
    if ring is None:
        return state.queries.pop(layer, None)
    last = ring.read(part.on(ring.q.device).before - 1, ring.rows)
    return last.q, last.positions


class _Asked:
    """What a policy asks about the keys of one layer in one forward, answered on demand.

    Refers to nothing that refers back to it: a cycle would hold the queries and keys of every
    layer of a prompt until Python's next garbage collection.

    pads: int [B] columns before the first key of each row.
    """

    def __init__(
        self,
        state: SparseState,
        layer: int,
        part: Part,
        queries: Queries,
        keys: Keys,
        scores: Scores,
        pads: np.ndarray,
    ) -> None:
        self.state, self.layer, self.queries = state, layer, queries
        self.part, self.remembered = part, _remembered(state, layer, part)
        rows, before = part.on(queries.q.device), state.moments.pop(layer, {})
        seen = part.once(("seen", queries.q.device), lambda: rows.before + rows.used)
        self.moments = PromptMoments(queries, seen, before, state.parts.rotary)
        self.keys, self.pads, self.scores = keys, pads, scores

    def last(self, rows: int) -> Queries:
        """The last `rows` queries, those of earlier forwards included."""
        return _observation_window(self.queries, self.remembered, rows)

    def feature(self, feature: Feature) -> Tensor:
        """fp32 [B, HK, S] by rank."""
        source = Source(
            self.keys, self.pads, self.scores, self.last, self.moments.ahead,
            lambda: self.state.parts.projections[self.layer],
        )  # fmt: skip
        return compute(feature, source)

    def remember(self) -> None:
        """Keep last queries and moments for a chunk or a compression that may follow."""
        state, layer = self.state, self.layer
        ordinal = state.ordinal.get(layer)
        if ordinal is None or state.limits is None:
            return
        rows = window_rows(state.policy, ordinal, "decode")
        if state.limits.mode[layer] == "interval" or (state.deferred and rows):
            on = self.part.on(self.queries.q.device)
            newest = on.before + on.used - 1
            state.rings[layer] = QueryRing.of(self.last(rows), rows, newest, self.scores)
        if not state.keep_queries:
            return
        rows = window_rows(state.policy, ordinal, "prefill")
        if rows and layer not in state.rings:
            last = self.last(rows)
            state.queries[layer] = (last.q, last.positions)
        for feature in state.policy.features(ordinal, "prefill"):
            if isinstance(feature, ExpectedProbability):
                self.moments.of(feature)
        if self.moments.made:
            state.moments[layer] = self.moments.made


def _observation_window(queries: Queries, remembered: Remembered, rows: int) -> Queries:
    """The last `rows` real queries of remembered and new ones; missing ones sit at -1."""
    q, positions = queries.q, queries.positions
    if remembered is not None:
        q = torch.cat([remembered[0], q], dim=2)
        positions = torch.cat([remembered[1], positions], dim=1)
    positions, order = positions.sort(dim=-1, stable=True)
    first = max(positions.shape[1] - rows, 0)
    order = order[:, None, first:, None].expand(-1, q.shape[1], -1, q.shape[-1])
    positions = positions[:, first:]
    return Queries(q.gather(2, order), positions, (positions >= 0).sum(-1, dtype=torch.int32))
