"""StreamingLLM's contiguous positions: the sink keys move along with the recent ones."""

from __future__ import annotations

import torch

from sparsekv.state import SparseState
from sparsekv.step import Part


def shift_sinks(state: SparseState, layer: int, part: Part) -> None:
    """Move the sink keys of a layer next to the recent ones.

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
    moved = moved & (slots < sinks[..., None])[..., None]
    store.write_keys(local, order, shift.rotate(true, delta), moved)
