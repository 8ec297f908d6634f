"""Layers that see fewer tokens than the one before (PyramidInfer), and cuts of generated tokens.

A layer attends the prompt tokens that reach it, caches all of them and chooses those that go on;
whoever runs the layers drops the hidden states of the others (`sparsekv/hf/pruning.py`). All rows
of a batch are prompts of the same length, so that counts are the same in every row and known to
the host: no cut waits for the device. A cut never happens inside a captured step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekv.cache.pages import upload
from sparsekv.headwise import Scores
from sparsekv.kernels.column_scores import column_scores
from sparsekv.kernels.decode import paged_decode_attention
from sparsekv.kernels.prefill import prefill_attention
from sparsekv.kernels.topk import select_topk
from sparsekv.policies import PyramidInfer
from sparsekv.state import SparseState
from sparsekv.step import Part

_LAST = torch.iinfo(torch.int32).max


@dataclass
class Pruning:
    """The prompt of a cache: `tokens` of it, the last `tail` in all layers, counts[l] in layer l.

    places: int64 [B, n], the positions of the tokens that go into the next layer, and chosen, the
    same as indices among the tokens of this one; None while all go on.
    """

    tokens: int
    tail: int
    counts: tuple[int, ...]
    places: Tensor | None = None
    chosen: Tensor | None = None


def attend_pruned(
    state: SparseState, layer: int, part: Part, q: Tensor, k: Tensor, v: Tensor, scores: Scores
) -> Tensor:
    """Attention of a prompt or a decoded token; q [B, HQ, n, D], k, v [B, HK, n, D].

    Raises:
        ValueError: padding, a prompt that comes in parts, drafts, or another number of tokens than
            the layer was planned to see.
    """
    if part.kind == "chunk" or part.start + part.tokens < state.chunked_until or state.recording:
        raise ValueError(
            f"expected a prompt in one forward and then single tokens under policy "
            f"{state.policy.name!r}, got a part of a prompt, a second turn or drafts: the tail "
            f"that decides is a share of the whole prompt"
        )
    run = _prompt if part.kind == "prefill" else _token
    return run(state, layer, part, q, k, v, scores)


def _prompt(
    state: SparseState, layer: int, part: Part, q: Tensor, k: Tensor, v: Tensor, scores: Scores
) -> Tensor:
    policy, (batch, _, tokens, _) = state.policy, k.shape
    assert isinstance(policy, PyramidInfer) and state.limits is not None
    if layer == 0:
        if (part.lengths < part.tokens).any():
            raise ValueError(
                f"expected rows of one length without padding under policy {policy.name!r}, got "
                f"{part.lengths.tolist()} tokens of {part.tokens}"
            )
        counts = np.minimum(state.limits.keep[:, 0, 0], part.tokens).tolist()
        state.pruning = Pruning(part.tokens, policy.tail(part.tokens), tuple(counts))
    pruning = state.pruning
    if pruning is None or tokens != pruning.counts[layer]:
        planned = None if pruning is None else pruning.counts[layer]
        raise ValueError(f"expected {planned} tokens in layer {layer}, got {tokens}")
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    ends = upload(np.arange(batch + 1, dtype=np.int32) * tokens, k.device)
    lengths = (ends, ends, tokens, tokens)
    how: dict[str, Any] = {"softmax_scale": scores.softmax_scale, "softcap": scores.softcap}
    out, lse = prefill_attention(flat_q, flat_k, flat_v, *lengths, sinks=scores.sinks, **how)
    _write(state, layer, k, v)
    last = layer + 1 == len(pruning.counts)
    if not last and pruning.counts[layer + 1] < tokens:
        weights = torch.zeros(batch, tokens, device=k.device)
        weights[:, -pruning.tail :] = _tail_weights(part, policy, pruning.tail, k.device)
        columns = column_scores(
            flat_q, flat_k, lse, *lengths, rows=pruning.tail, group="layer_mean",
            row_weights=weights.flatten(), **how,
        )[:, 0]  # fmt: skip
        _choose(pruning, layer, columns.float(), policy.sinks)
    return out.unflatten(0, (batch, tokens))


def _tail_weights(part: Part, policy: PyramidInfer, tail: int, device: torch.device) -> Tensor:
    """Weights of the tail's rows, fp32 [tail]; uploaded once a prompt, so no layer waits for it."""
    return part.once(("tail", device), lambda: upload(policy.weights(tail).numpy(), device))


def _write(state: SparseState, layer: int, k: Tensor, v: Tensor) -> None:
    """All tokens of the layer into slots 0, 1, ..., with their positions in the prompt."""
    (store, local), (batch, heads, tokens, _) = state.store(layer), k.shape
    assert state.pruning is not None
    slots = torch.arange(tokens, dtype=torch.int32, device=k.device)
    places = state.pruning.places
    positions = slots[None] if places is None else places.to(k.device).int()
    shape = (batch, heads, tokens)
    store.append(local, k, v, slots.expand(shape), positions[:, None].expand(shape))
    count = torch.full((batch, heads), tokens, dtype=torch.int32, device=k.device)
    store.set_lens(local, count, np.full((batch, heads), tokens, dtype=np.int32))


def _choose(pruning: Pruning, layer: int, columns: Tensor, sinks: int) -> None:
    """The tokens that go on from `layer`, by columns fp32 [B, n]."""
    batch, tokens = columns.shape
    context, keep = tokens - pruning.tail, pruning.counts[layer + 1] - pruning.tail
    every = torch.arange(tokens, device=columns.device)
    length = torch.full((batch,), context, dtype=torch.int32, device=columns.device)
    first = (every[:context] < sinks).expand(batch, -1).contiguous()
    best, _ = select_topk(columns[:, :context].contiguous(), length, keep, protected=first)
    chosen = torch.cat([best.long(), every[context:].expand(batch, -1)], dim=1)
    places = pruning.places
    pruning.chosen = chosen
    pruning.places = chosen if places is None else places.to(chosen.device).gather(1, chosen)


def _token(
    state: SparseState, layer: int, part: Part, q: Tensor, k: Tensor, v: Tensor, scores: Scores
) -> Tensor:
    """Append a token, attend, add its row to the sums of the slots, cut a window that is due."""
    store, local = state.store(layer)
    pool, table, lens = store.pool, store.block_table[local], store.seqlens[local]
    newest = part.on(k.device).before[:, None, None]
    store.append(local, k, v, None, newest.expand(*lens.shape, 1), count=True)
    store.lens[local] += 1
    out, _, probs = paged_decode_attention(
        q[:, :, 0], pool.k_pages, pool.v_pages, table, lens,
        softmax_scale=scores.softmax_scale, softcap=scores.softcap, sinks=scores.sinks,
        probs="mean", k_scales=pool.k_scales, v_scales=pool.v_scales,
    )  # fmt: skip
    assert probs is not None
    old, positions = store.view(local, "scores"), store.view(local, "positions")
    row = probs[..., : old.shape[-1]].mean(1, keepdim=True)  # of all query heads
    store.store_scores(local, old + _row_weights(state, positions, newest) * row)
    if not state.capturing:
        cut(state, layer)
    return out[:, None]


def _row_weights(state: SparseState, positions: Tensor, newest: Tensor) -> Tensor:
    """What the row of the token at `newest` weighs in the score of each slot, fp32 [B, HK, S].

    The window a token belongs to and the rows that judge it follow from its position: window w
    (from 1) is judged by the rows of decode steps w E .. w E + R.
    """
    policy, pruning = state.policy, state.pruning
    assert isinstance(policy, PyramidInfer) and pruning is not None
    generated = positions - (pruning.tokens - 1)
    window = generated // policy.exceed + 1
    row = newest - (pruning.tokens - 1) - window * policy.exceed
    rise = (policy.distance_weight - 1.0) / max(pruning.tail - 1, 1)
    counts = (generated >= 0) & (row >= 0) & (row < pruning.tail)
    return torch.where(counts, 1.0 + rise * row, 0.0)


def cut_due(state: SparseState) -> None:
    """Cut in every layer what the last step, which the device ran alone, has made due."""
    if state.pruning is not None:
        for layer in state.ordinal:
            cut(state, layer)


def cut(state: SparseState, layer: int) -> None:
    """Keep the best of a window of generated tokens, once R + E have come since the last cut."""
    policy, pruning = state.policy, state.pruning
    assert isinstance(policy, PyramidInfer) and pruning is not None
    size = policy.exceed
    ready = int(state.tokens[0]) - pruning.tokens - (pruning.tail - 1)  # steps less R
    if ready < size or ready % size:
        return
    store, local = state.store(layer)
    keep = policy.generated(layer, len(pruning.counts))
    if not state.steady:  # it writes slots that a fork may share
        store.unshare(local)
    positions, lens = store.view(local, "positions"), store.seqlens[local]
    slot = torch.arange(positions.shape[-1], device=lens.device)
    start = pruning.tokens - 1 + ready - size
    inside = (positions >= start) & (positions < start + size) & (slot < lens[..., None])
    slots = torch.where(inside, positions, _LAST).argsort(dim=-1)[..., :size]  # by position
    sums = store.view(local, "scores").gather(-1, slots).flatten(0, 1)
    full = torch.full(sums.shape[:1], size, dtype=torch.int32, device=lens.device)
    best = select_topk(sums, full, keep)[0].long().unflatten(0, lens.shape)
    stays = torch.ones_like(inside).scatter(-1, slots, False)
    stays = stays.scatter(-1, slots.gather(-1, best), True)
    store.compact(local, stays, store.lens[local] - size + keep)
    if not state.steady:  # steady pages stay where they are
        store.trim(local)
