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
from sparsekv.policies.base import Need, Phase, Selection, Stats, TopK
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
    scores = policy.score(ordinal, stats).float()
    width = None if policy.ragged else int(host.max())
    selection = policy.select(
        scores, keep, keys.protected(state.limits, layer), _topk(keys.held, width),
        layer=ordinal, stats=stats,
    )  # fmt: skip
    if policy.ragged:
        host = selection.count.cpu().numpy()
    return Kept(selection, host, slot_scores, False)


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


def _topk(held: Tensor, width: int | None) -> TopK:
    """Top-k over lists of `held` keys; width bounds how many of one are kept, if that is known."""

    def topk(
        scores: Tensor, keep: Tensor, protected: Tensor, lengths: Tensor | None = None
    ) -> Selection:
        lengths, bound = (held, width) if lengths is None else (lengths, None)
        index, count = select_topk(
            scores.flatten(0, 1), lengths.flatten(), keep.flatten(),
            protected=protected.flatten(0, 1), max_k=bound,
        )  # fmt: skip
        return Selection(index.unflatten(0, keep.shape), count.view(keep.shape))

    return topk
