"""The ranking of each policy: what it gives to the keys of a layer when something must go.

Each function returns, by KV head, a score for every position that nothing protects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from reference import expected, keys, rkv, values
from reference.chunks import chunk_means
from reference.types import Head, Ranking, View
from reference.votes import column_sums, low_counts, pool_scores, seen_by


def rank(view: View) -> Ranking:
    """Scores under the view's policy; higher stays."""
    return _SCORES[view.policy.name](view)


def innermost(policy: Any) -> Any:
    """The scorer at the heart of wrappers."""
    return innermost(policy.scorer) if hasattr(policy, "scorer") else policy


def window_votes(view: View) -> Tensor:
    """Column sums of the observation queries, [HK, N]."""
    return column_sums(view.rows(*view.window), view.kv_heads, view.policy.group)


def _by_state(view: View) -> Ranking:
    return [{j: view.heads[h][j] for j in view.free(h)} for h in range(view.kv_heads)]


def _table(view: View, table: Tensor) -> Ranking:
    """From scores [HK, N] by position."""
    return [{j: row[j] for j in view.free(h)} for h, row in enumerate(table.tolist())]


def _pooled(view: View, score_of: Callable[[int, int], float]) -> Ranking:
    """Pooled over the keys before the protected recent ones."""
    ranking = []
    for h in range(view.kv_heads):
        older = view.older(h)
        raw = {j: score_of(h, j) for j in older}
        ranking.append(pool_scores(raw, older, view.policy.pool, view.policy.kernel))
    return ranking


def _snapkv(view: View) -> Ranking:
    votes = window_votes(view).tolist()
    return _pooled(view, lambda h, j: votes[h][j])


def _layersplit(view: View) -> Ranking:
    return _pooled(view, lambda h, j: view.heads[h][j])


def _scissorhands(view: View) -> Ranking:
    q, at = view.window
    visible = seen_by(at, view.heads, view.seen, len(q))
    return _table(view, -low_counts(view.rows(q, at), visible, view.kv_heads, view.policy.group))


def _per_head(view: View, score: Callable[[int, list[int]], list[float]]) -> Ranking:
    """From a function of a head and its kept positions, ascending."""
    ranking: Ranking = []
    for h in range(view.kv_heads):
        kept, free = view.kept(h), set(view.free(h))
        scores = zip(kept, score(h, kept), strict=True)
        ranking.append({j: s for j, s in scores if j in free})
    return ranking


def _knorm(view: View) -> Ranking:
    return _per_head(view, lambda h, kept: (-keys.norms(view.k[h, kept])).tolist())


def _random(view: View) -> Ranking:
    seed, layer = view.policy.seed, view.layer
    return _per_head(view, lambda h, kept: keys.random_scores(seed, layer, h, kept))


def _keydiff(view: View) -> Ranking:
    return _per_head(view, lambda h, kept: (-keys.anchor_cosines(view.k[h, kept])).tolist())


def _expected(view: View) -> Ranking:
    policy = view.policy
    queries = torch.cat(view.unrotated, 1).unflatten(0, (view.kv_heads, -1))  # [HK, G, M, D]
    width = view.k.shape[-1]
    ahead = expected.mean_rotation(width, view.theta, view.seen, policy.future)

    def score(h: int, kept: list[int]) -> list[float]:
        first = sum(j < policy.sinks for j in kept)
        p = expected.probability(
            view.k[h, kept], queries[h], first, view.scale, ahead, policy.covariance
        )
        length = values.norms(view.v)[h, kept] if policy.value_norm else 1.0
        return ((p + policy.epsilon) * length).tolist()

    return _per_head(view, score)


def _rkv(view: View) -> Ranking:
    policy, (q, _) = view.policy, view.window
    groups = q.unflatten(0, (view.kv_heads, -1))

    def score(h: int, kept: list[int]) -> list[float]:
        recent = view.plan.recent
        z = rkv.ranking(
            groups[h], view.k[h, kept], recent, view.scale,
            policy.kernel, policy.similarity, policy.mix,
        )  # fmt: skip
        return [*z.tolist(), *[0.0] * recent]

    return _per_head(view, score)


def _inner(view: View) -> Ranking:
    return rank(replace(view, policy=view.policy.scorer))


def _chunked(view: View) -> Ranking:
    free = [set(view.free(h)) for h in range(view.kv_heads)]
    scores = _inner(view)
    unprotected: list[Head] = [
        {j: s for j, s in head.items() if j in allowed}
        for head, allowed in zip(scores, free, strict=True)
    ]
    return [chunk_means(unprotected, view.policy.chunk)] * view.kv_heads


_SCORES: dict[str, Callable[[View], Ranking]] = {
    "streaming": _by_state,
    "h2o": _by_state,
    "keyformer": _by_state,
    "tova": _by_state,
    "duo": _by_state,
    "layersplit": _layersplit,
    "snapkv": _snapkv,
    "pyramid": _snapkv,
    "scissorhands": _scissorhands,
    "knorm": _knorm,
    "random": _random,
    "keydiff": _keydiff,
    "expected": _expected,
    "rkv": _rkv,
    "adakv": _inner,
    "criticalkv": _inner,
    "chunked": _chunked,
    "planned": _inner,
}
