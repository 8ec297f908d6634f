"""From statistics to kept keys: observe, score, protect, top-k."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sparsekv.cache.pages import upload
from sparsekv.kernels.topk import select_topk
from sparsekv.plan import Limits
from sparsekv.policies.base import Need, Phase, Policy, Selection, Stats
from sparsekv.policies.features import Feature
from sparsekv.state import SparseState


@dataclass(frozen=True)
class Candidates:
    """Keys of one layer in ascending position order.

    positions int32 [B, HK, S]; held int32 [B, HK] how many are real, host the same on the host;
    slot_scores fp32 [B, HK, S] of stateful policies. Layers may share one object: what depends on
    limits only is made once.
    """

    positions: Tensor
    held: Tensor
    host: np.ndarray
    slot_scores: Tensor | None
    _made: dict[tuple, Tensor] = field(default_factory=dict)

    def counts(self, host: np.ndarray) -> Tensor:
        """`host` int [B, HK] as int32 on the device."""
        key = ("counts", host.tobytes())
        if key not in self._made:
            self._made[key] = upload(host.astype(np.int32), self.held.device)
        return self._made[key]

    def protected(self, limits: Limits, layer: int) -> Tensor:
        """bool [B, HK, S]: the sinks and recent keys of a layer."""
        key = ("protected", limits.sinks[layer].tobytes(), limits.recent[layer].tobytes())
        if key not in self._made:
            _, sinks, recent = limits.on(self.held.device, layer)
            rank = torch.arange(self.positions.shape[-1], device=self.held.device)
            newest = rank >= (self.held - recent)[..., None]
            self._made[key] = newest | (self.positions < sinks[..., None])
        return self._made[key]


@dataclass(frozen=True)
class Kept:
    """What stays: the selection, its counts on the host int [B, HK], and the slot scores."""

    selection: Selection
    host: np.ndarray
    slot_scores: Tensor | None
    everything: bool


def choose(
    state: SparseState,
    layer: int,
    keys: Candidates,
    columns_of: Callable[[Need], Tensor],
    feature_of: Callable[[Feature], Tensor],
    phase: Phase = "prefill",
) -> Kept:
    """Let the policy see what it asked for and decide which of `keys` stay.

    columns_of(need) and feature_of(feature) -> fp32 [B, HK, S] are called only if somebody needs
    the answer: features when something must go, a statistic then or by a stateful policy.
    phase: "decode" cuts the heads that decode steps have brought over their budget.

    Raises:
        ValueError: a policy scores other keys than these, or selects more of them than it may, or
            what is no selection.
    """
    assert state.limits is not None
    policy, ordinal = state.policy, state.ordinal.get(layer)
    pooled = policy.ragged and ordinal is not None
    host = _keep(state.limits, layer, keys.host, phase, pooled)
    drop = bool((host.sum(-1) < keys.host.sum(-1)).any())
    need = None if ordinal is None else policy.needs(ordinal, phase)
    if state.deferred and need is not None and need.rows is not None:
        need = None  # the observation window is the end of the prompt, which is still to come
    columns = columns_of(need) if need is not None and (policy.stateful or drop) else None
    slot_scores = keys.slot_scores
    if columns is not None and policy.stateful and ordinal is not None:
        old = torch.zeros_like(columns) if slot_scores is None else slot_scores
        slot_scores = policy.observe(ordinal, phase, old, columns, keys.positions).float()
    if not drop:
        return Kept(_newest(keys, keys.held), keys.host, slot_scores, True)
    keep = keys.counts(host)
    if ordinal is None:  # a sliding layer: the newest window - 1
        return Kept(_newest(keys, keep), host, slot_scores, False)
    _, _, recent = state.limits.on(keys.held.device, layer)
    features = {feature: feature_of(feature) for feature in policy.features(ordinal, phase)}
    stats = Stats(columns, slot_scores, keys.positions, keys.held, recent[:, 0], features)
    scores = _scores(policy, ordinal, stats)
    topk = _TopK(keys, None if policy.ragged else int(host.max()))
    selection = policy.select(
        scores, keep, keys.protected(state.limits, layer), topk, layer=ordinal, stats=stats
    )
    if not topk.gave(selection, keep) or policy.ragged:
        host = _counted(policy, selection, keys, host, topk.gave(selection))
    return Kept(selection, host, slot_scores, False)


def _scores(policy: Policy, layer: int, stats: Stats) -> Tensor:
    """What the policy makes of `stats`, fp32 [B, HK, S]."""
    scores, shape = policy.score(layer, stats), tuple(stats.positions.shape)
    if not isinstance(scores, Tensor) or scores.shape != shape:
        got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(
            f"expected scores of shape {list(shape)} from {type(policy).__name__}, got {got}"
        )
    return scores.float()


def _keep(limits: Limits, layer: int, held: np.ndarray, phase: Phase, pooled: bool) -> np.ndarray:
    """Keys that heads may keep of `held` int [B, HK].

    pooled: the heads of a row share what they may keep, so one may hold more than its own part; the
    limit is cut to what the row holds only to keep sums small.
    """
    limit = limits.keep[layer]
    if phase == "decode":
        limit = np.where(held > limits.budget[layer], limits.low[layer], held)
    return np.minimum(limit, held.sum(-1, keepdims=True) if pooled else held)


def _newest(keys: Candidates, keep: Tensor) -> Selection:
    """The last `keep` int32 [B, HK] keys."""
    rank = torch.arange(keys.positions.shape[-1], dtype=torch.int32, device=keep.device)
    index = rank + (keys.held - keep)[..., None]
    return Selection(torch.where(rank < keep[..., None], index, -1).int(), keep)


class _TopK:
    """Top-k over the keys of a layer; width bounds how many a head keeps, if that is known.

    Remembers its last answer: what a policy hands on as it came is right by construction, and no
    host has to wait to look at it.
    """

    def __init__(self, keys: Candidates, width: int | None) -> None:
        self.keys, self.width = keys, width
        self._last: tuple[Selection, Tensor] | None = None

    def __call__(
        self, scores: Tensor, keep: Tensor, protected: Tensor, lengths: Tensor | None = None
    ) -> Selection:
        """See `sparsekv.policies.base.TopK`."""
        own = lengths is None and scores.shape == self.keys.positions.shape
        held, bound = (self.keys.held, self.width) if lengths is None else (lengths, None)
        index, count = select_topk(
            scores.flatten(0, 1), held.flatten(), keep.flatten(),
            protected=protected.flatten(0, 1), max_k=bound,
        )  # fmt: skip
        selection = Selection(index.unflatten(0, keep.shape), count.view(keep.shape))
        self._last = (selection, keep) if own else None
        return selection

    def gave(self, selection: Selection, keep: Tensor | None = None) -> bool:
        """Whether this is the last answer about the keys held; `keep`: to that very question."""
        if self._last is None or selection is not self._last[0]:
            return False
        return keep is None or keep is self._last[1]


def _counted(
    policy: Policy, selection: Selection, keys: Candidates, most: np.ndarray, well_formed: bool
) -> np.ndarray:
    """Kept keys int [B, HK]; waits for the device. most: int [B, HK] that the heads may keep.

    well_formed: the indices need no check.
    """
    select = f"{type(policy).__name__}.select"
    if well_formed:
        host = selection.count.cpu().numpy()
    else:
        _check_form(select, selection, most.shape)
        right = _in_order(selection, keys.held)
        host, fine = torch.stack([selection.count, right.int()]).cpu().numpy()
        if not fine.all():
            row, head = np.argwhere(fine == 0)[0]
            raise ValueError(
                f"expected {select} to give indices of held keys, ascending, each once, then -1, "
                f"got others in row {row}, KV head {head}"
            )
    if policy.ragged:
        kept, may, whose = host.sum(-1), most.sum(-1), "of all KV heads of a row together"
    else:
        kept, may, whose = host, most, "of a KV head"
    if (kept > may).any():
        worst = np.unravel_index((kept - may).argmax(), kept.shape)
        raise ValueError(
            f"expected {select} to keep at most {may[worst]} keys {whose}, got {kept[worst]}"
        )
    return host


def _check_form(select: str, selection: Selection, heads: tuple[int, ...]) -> None:
    """Raise ValueError unless a selection is index int32 [B, HK, K] and count int32 [B, HK]."""
    if not isinstance(selection, Selection):
        raise ValueError(f"expected {select} to give a Selection, got {selection!r}")
    index, count = selection.index, selection.count
    shapes = index.shape[:-1] == heads == count.shape and index.ndim == 3
    if not shapes or {index.dtype, count.dtype} != {torch.int32}:
        batch, kv_heads = heads
        raise ValueError(
            f"expected {select} to give index int32 [{batch}, {kv_heads}, K] and count int32 "
            f"[{batch}, {kv_heads}], got {index.dtype} {list(index.shape)} and {count.dtype} "
            f"{list(count.shape)}"
        )


def _in_order(selection: Selection, held: Tensor) -> Tensor:
    """bool [B, HK]: `count` ascending indices below `held`, nothing but -1 behind them."""
    index, count = selection.index, selection.count
    listed = torch.arange(index.shape[-1], device=index.device) < count[..., None]
    known = torch.where(listed, (index >= 0) & (index < held[..., None]), index == -1).all(-1)
    rises = ((index[..., 1:] > index[..., :-1]) | ~listed[..., 1:]).all(-1)
    return known & rises & (count >= 0) & (count <= index.shape[-1])
