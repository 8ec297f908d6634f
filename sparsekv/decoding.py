"""One token: append it or let it replace a slot, paged attention, drop at most one slot."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from sparsekv.headwise import Scores
from sparsekv.interval import note_step
from sparsekv.kernels.decode import paged_decode_attention
from sparsekv.kernels.evict import Action, evict_slot
from sparsekv.kernels.perturb import perturbed_row
from sparsekv.policies.base import Need
from sparsekv.selecting import attended_pages, note_keys
from sparsekv.sinks import shift_sinks
from sparsekv.state import SparseState
from sparsekv.step import Part


def decode(
    state: SparseState, layer: int, part: Part, q: Tensor, k: Tensor, v: Tensor, scores: Scores
) -> Tensor:
    """Attend the cache and one new token a row."""
    store, local = state.store(layer)
    pool, spec = store.pool, state.layers[layer]
    if state.recording:
        state.open_round(layer)  # remembers the queries that go below
        state.log[layer].append((part, q, k, v, scores))
        store.ensure(np.array([local]), np.ones_like(store.lens[:1]), state.rewrites[[layer]])
    state.queries.pop(layer, None)
    state.moments.pop(layer, None)
    compresses = state.limits.mode[layer] == "interval"  # type: ignore[union-attr]
    if not compresses:
        state.rings.pop(layer, None)
    _append_token(state, layer, part, k, v)
    shift_sinks(state, layer, part)
    ordinal = state.ordinal.get(layer)
    need = None if ordinal is None or compresses else state.policy.needs(ordinal, "decode")
    table, lens = attended_pages(state, layer, q[:, :, 0])
    out, _, probs = paged_decode_attention(
        q[:, :, 0], pool.k_pages, pool.v_pages, table, lens,
        softmax_scale=scores.softmax_scale, softcap=scores.softcap, sinks=scores.sinks,
        window=spec.window, positions=pool.positions if spec.window else None,
        q_positions=part.on(q.device).before if spec.window else None, probs=_reduction(need),
        k_scales=pool.k_scales, v_scales=pool.v_scales,
    )  # fmt: skip
    if need is not None and probs is not None:
        probs = _columns(state, layer, part, need, probs)
    _settle_token(state, layer, part, probs)
    if compresses:
        note_step(state, layer, part, q)
    return out[:, None]


def _reduction(need: Need | None) -> str | None:
    """What the attention kernel hands out of a step's probabilities."""
    if need is None:
        return None
    if need.noise is not None:  # a softmax of its own, from those of each query head
        return "none"
    return "mean" if need.group == "layer_mean" else need.group


def _columns(state: SparseState, layer: int, part: Part, need: Need, probs: Tensor) -> Tensor:
    """The statistic of one query, fp32 [B, HK, >= S] by slot."""
    if need.group == "layer_mean":
        return probs.mean(1, keepdim=True).expand_as(probs)
    if need.noise is None:
        return probs
    store, local = state.store(layer)
    noise = need.noise
    return perturbed_row(
        probs, store.view(local, "positions"), store.seqlens[local],
        part.on(probs.device).before, state.prompt_lengths_on(probs.device),
        seed=noise.seed, layer=state.ordinal[layer], tau_start=noise.tau_start,
        tau_end=noise.tau_end, tau_steps=noise.tau_steps, noise=noise.kind, group=need.group,
    )  # fmt: skip


def _append_token(state: SparseState, layer: int, part: Part, k: Tensor, v: Tensor) -> None:
    """Append the token to each head, or let it take the slot of the head's victim."""
    assert state.limits is not None
    store, local = state.store(layer)
    lens, host = store.seqlens[local], store.lens[local] + 1
    slots = None
    if state.limits.mode[layer] == "replace":
        host = np.minimum(host, state.limits.budget[layer])
        if state.steady or (host == store.lens[local]).any():
            slots = _evict(state, layer, part, "replace")  # counts the token, too
    positions = part.on(k.device).before[:, None, None].expand(*lens.shape, 1)
    if slots is None:
        store.append(local, k, v, None, positions, count=True)
    else:
        store.append(local, k, v, slots[..., None], positions)
    store.lens[local] = host
    note_keys(state, layer, part, k)


def _settle_token(state: SparseState, layer: int, part: Part, probs: Tensor | None) -> None:
    """Fold the step's probabilities into the scores; drop a slot where budget + 1 are attended."""
    assert state.limits is not None
    store, local = state.store(layer)
    limit = state.limits.budget[layer]
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
