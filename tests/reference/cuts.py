"""From a ranking to the keys that stay."""

from __future__ import annotations

import math
from typing import Any

from reference.critical import two_stages
from reference.heads import mixed, normalised, safeguarded, top
from reference.plans import exact
from reference.scores import rank
from reference.types import Head, Ranking, View
from reference.values import projected_norms


def cut(view: View, limits: list[int | None]) -> None:
    """Drop from `view.heads` whatever does not fit into `limits`, slots of each KV head."""
    held = [len(head) for head in view.heads]
    if ragged(view.policy):
        if sum(held) <= sum(limits):
            return
    elif all(limit is None or n <= limit for limit, n in zip(limits, held, strict=True)):
        return
    ranking = rank(view)
    kept = _choose(view, ranking, limits)
    for h, head in enumerate(view.heads):
        for j in set(head) - kept[h] - view.safe(h):
            del head[j]


def ragged(policy: Any) -> bool:
    """Whether heads of a layer may keep different numbers."""
    return policy.name == "adakv" or (policy.name == "criticalkv" and ragged(policy.scorer))


def _choose(view: View, ranking: Ranking, limits: list[int | None]) -> list[set[int]]:
    policy = view.policy
    scores = [{j: head[j] for j in view.free(h)} for h, head in enumerate(ranking)]
    rest = [
        math.inf if limit is None else max(limit - len(view.safe(h)), 0)
        for h, limit in enumerate(limits)
    ]
    if ragged(policy):
        wrapper = policy if policy.name == "adakv" else policy.scorer
        rest = head_budgets(wrapper, view.layer, scores, rest)
    if policy.name == "criticalkv":
        return _critical(view, scores, rest)
    return [
        set(head) if n >= len(head) else top(head, n) for head, n in zip(scores, rest, strict=True)
    ]


def head_budgets(wrapper: Any, layer: int, scores: list[Head], rest: list[int]) -> list[int]:
    """What Ada-KV gives to each head of a layer; `rest` are equal shares."""
    (base,) = set(rest)
    if layer < wrapper.skip:
        return [min(base, len(head)) for head in scores]
    if wrapper.normalise:
        scores = [normalised(head, base) for head in scores]
    share = {"mix": mixed, "safeguard": safeguarded}[wrapper.mode]
    return share(scores, base, exact(wrapper.floor))


def _critical(view: View, scores: list[Head], rest: list[int]) -> list[set[int]]:
    policy = view.policy
    norms = projected_norms(view.v, view.o_proj, view.q.shape[0]).tolist()
    first = exact(policy.first_share)
    inner = policy.scorer.scorer if policy.scorer.name == "adakv" else policy.scorer
    # epsilon is for a mean over query rows, as published; votes are sums over the window's.
    epsilon = policy.epsilon * getattr(inner, "window", 1)
    return [
        two_stages(head, {j: norms[h][j] for j in head}, n, first, epsilon)
        for h, (head, n) in enumerate(zip(scores, rest, strict=True))
    ]


def victim(view: View, head: int, current: int) -> int:
    """Lowest state, of equal states the oldest, among keys that may go; `current` is the newest."""
    plan, scores = view.plan.of(head), view.heads[head]
    free = [j for j in scores if plan.sinks <= j <= current - plan.recent]
    return min(free, key=lambda j: (scores[j], j))


def limits_after_prompt(view: View) -> list[int | None]:
    """Slots of each KV head once a prompt is in."""
    return [view.plan.of(h).left() for h in range(view.kv_heads)]


def compress(view: View) -> None:
    """decode="interval": down to `low` once a step leaves more than `budget`."""
    held = len(view.heads[0])
    if view.plan.budget is not None and held > view.plan.budget:
        cut(view, [view.plan.low] * view.kv_heads)
