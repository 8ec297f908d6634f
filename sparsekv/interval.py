"""Compressions between decode steps: once more than `budget` slots are held, keep the `low` best.

The host knows every length, so it knows when a compression is due. It runs right after the step, or
after the replay of a captured step; a captured step itself only appends and notes its query. What
is kept is decided as after a prompt, by the policy's statistics over the keys held and the last
queries (`sparsekv.ring`).
"""

from __future__ import annotations

from functools import partial

import numpy as np
from torch import Tensor

from sparsekv.cache.pages import upload
from sparsekv.device import device_of
from sparsekv.features import Source, compute
from sparsekv.headwise import Queries
from sparsekv.held import HeldKeys, drop
from sparsekv.policies.base import Need
from sparsekv.policies.features import ExpectedProbability
from sparsekv.selection import Candidates, choose
from sparsekv.state import SparseState
from sparsekv.step import Part


def note_step(state: SparseState, layer: int, part: Part, q: Tensor) -> None:
    """Remember the query of a step, q [B, HQ, 1, D], and compress the layer if that is due."""
    ring, device = state.rings[layer], q.device
    entry = part.once(
        ("ring", device, ring.rows), lambda: part.on(device).before.long() % max(ring.rows, 1)
    )
    ring.write(q, entry)
    if not state.capturing and is_due(state, layer):
        compress(state, layer, part.seen)


def compress_due(state: SparseState) -> None:
    """Compress every layer that the last step, which the device ran alone, has left over budget."""
    for layer in state.ordinal:
        if is_due(state, layer):
            with device_of(state.rings[layer].q):
                compress(state, layer, state.tokens)


def is_due(state: SparseState, layer: int) -> bool:
    """Whether a head of a layer with compressions holds more than its budget."""
    assert state.limits is not None
    if state.limits.mode[layer] != "interval":
        return False
    store, local = state.store(layer)
    return bool((store.lens[local] > state.limits.budget[layer]).any())


def compress(state: SparseState, layer: int, seen: np.ndarray) -> None:
    """Cut every row of a layer that is over its budget down to `low`; the others keep all.

    seen: int [B] real tokens of each row so far.
    """
    (store, local), own = state.store(layer), state.ordinal[layer]
    if not state.steady:  # it writes slots that a fork may share
        store.unshare(local)
    held, ring = HeldKeys.of(store, local), state.rings[layer]
    newest = upload((seen - 1).astype(np.int32), held.order.device)

    def last(rows: int) -> Queries:
        return ring.read(newest, rows)

    def columns_of(need: Need) -> Tensor:
        return held.columns(last(need.rows or ring.rows), need, ring.scores, None, own)

    source = Source(
        held.keys, np.zeros_like(seen), ring.scores, last, _no_moments,
        lambda: state.parts.projections[layer],
    )  # fmt: skip
    candidates = Candidates(held.keys.positions, held.keys.held, store.lens[local], None)
    kept = choose(state, layer, candidates, columns_of, partial(compute, source=source), "decode")
    drop(store, local, held.order, kept, trim=not state.steady)  # steady pages stay where they are


def _no_moments(feature: ExpectedProbability) -> tuple[Tensor, Tensor | None]:
    raise ValueError(f"expected a feature of keys or last queries between steps, got {feature}")
