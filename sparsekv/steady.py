"""Decode steps that do the same device work every time, so that they can be captured once.

Between `hold` and the next prompt a step touches fixed memory with fixed shapes: pages for many
steps are found in advance, row positions count up on the device, and the branches that ordinary
steps take by host lengths (is the budget in use yet?) are taken by the device instead. What is left
for the host is to count along, which `advance` does for steps that Python did not run, and to run
the compressions of `decode="interval"` that are due then (`sparsekv.interval`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsekv.plan import EVICTING
from sparsekv.state import SparseState
from sparsekv.step import Part


def hold(state: SparseState, steps: int) -> None:
    """Find pages for `steps` more decode steps of every layer and make the state steady.

    Raises:
        ValueError: nothing cached yet, or drafts being recorded.
    """
    if state.limits is None or state.recording:
        raise ValueError("expected a cache with a prompt that records no drafts")
    for store in state.stores:
        members = state.members(store)
        room = _most(state, members) - store.lens
        store.ensure(
            np.arange(len(members)), np.clip(room, 0, steps).astype(np.int32),
            state.rewrites[members] | (state.limit_modes[members] == "interval"),
        )  # fmt: skip
    start, ones = max(state.seen), np.ones_like(state.tokens)
    last = Part("decode", start - 1, 1, ones, state.tokens)  # counted up by the next step
    state.held_steps = steps
    state.steady = {store.pool.device: last.on(store.pool.device) for store in state.stores}


def advance(state: SparseState) -> None:
    """Count one decode step that the device has run without Python."""
    assert state.limits is not None
    for store in state.stores:
        members = state.members(store)
        budget = state.limits.budget[members]
        evicts = np.isin(state.limit_modes[members], EVICTING)[:, None, None]
        store.lens = np.where(evicts, np.minimum(store.lens + 1, budget), store.lens + 1)
    state.count_step()


def addresses(state: SparseState) -> tuple[int, ...]:
    """Where the memory lies that a captured step reads and writes."""
    tensors = [
        tensor
        for store in state.stores
        for tensor in (*store.pool.page_tensors.values(), store.block_table, store.seqlens)
    ]
    tensors += [rows.before for rows in (state.steady or {}).values()]
    tensors += [ring.q for ring in state.rings.values()]
    return tuple(tensor.data_ptr() for tensor in tensors)


@dataclass(frozen=True)
class HostCount:
    """The host's share of a state, to be put back when a capture fails half way."""

    seen: list[int]
    tokens: np.ndarray
    held_steps: int
    lens: list[np.ndarray]

    @classmethod
    def of(cls, state: SparseState) -> HostCount:
        """What the host knows now."""
        lens = [store.lens.copy() for store in state.stores]
        return cls(list(state.seen), state.tokens, state.held_steps, lens)

    def put_back(self, state: SparseState) -> None:
        """Forget the steps since; the device has run none of them."""
        state.seen, state.tokens = list(self.seen), self.tokens
        state.held_steps = self.held_steps
        for store, lens in zip(state.stores, self.lens, strict=True):
            store.lens = lens
        state.forget_forward()


def _most(state: SparseState, members: np.ndarray) -> Any:
    """Slots a head of each layer may come to hold, int64 [l, B, HK]."""
    assert state.limits is not None
    budget = state.limits.budget[members].astype(np.int64)
    modes = state.limit_modes[members][:, None, None]
    unlimited = np.iinfo(np.int64).max // 2
    return np.where(modes == "grow", unlimited, budget + (modes != "replace"))
