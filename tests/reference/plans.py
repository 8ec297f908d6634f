"""What each layer keeps of a prompt: integer arithmetic, one small function a policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from reference import planned, pyramid
from reference.duo import duo_plans
from reference.types import Plan


def exact(value: float) -> Fraction:
    """The decimal that was written: 0.2 is 1/5."""
    return Fraction(str(value))


def slots_of(budget: int | float, tokens: int) -> int:
    """Slots a KV head on average; a float is the fraction of the tokens, rounded half up."""
    if not isinstance(budget, float):
        return budget
    return max(1, math.floor(exact(budget) * tokens + Fraction(1, 2)))


def make_plans(policy: Any, budget: int | float, layers: int, tokens: int) -> list[Plan]:
    """The plan of every layer for `tokens` tokens."""
    return _PLANS[policy.name](policy, slots_of(budget, tokens), layers, tokens)


def _full(policy: Any, slots: int, layers: int, tokens: int) -> list[Plan]:
    return [Plan(None)] * layers


def _plain(policy: Any, slots: int, layers: int, tokens: int) -> list[Plan]:
    return [Plan(slots)] * layers


def _wrapped(policy: Any, slots: int, layers: int, tokens: int) -> list[Plan]:
    return make_plans(policy.scorer, slots, layers, tokens)


def _streaming(policy: Any, slots: int, layers: int, tokens: int) -> list[Plan]:
    sinks = min(policy.sinks, slots - 1)
    return [Plan(slots, sinks, slots - sinks, "replace")] * layers


def _h2o(policy: Any, slots: int, layers: int, tokens: int) -> list[Plan]:
    heavy = math.floor(slots * exact(policy.heavy_fraction))
    return [Plan(slots, 0, slots - heavy, "evict")] * layers


def _tova(policy: Any, slots: int, layers: int, tokens: int) -> list[Plan]:
    return [Plan(slots, decode="evict")] * layers


def _keyformer(policy: Any, slots: int, layers: int, tokens: int) -> list[Plan]:
    recent = math.floor(slots * exact(policy.recent_fraction))
    return [Plan(slots, 0, recent, "evict")] * layers


def _scissorhands(policy: Any, slots: int, layers: int, tokens: int) -> list[Plan]:
    """Drop m at a time until the budget holds."""
    m = max(1, math.floor(exact(policy.drop) * slots))
    left, low = tokens, slots + 1 - m
    while left > slots:
        left -= m
    recent = min(policy.recent, low)
    return [Plan(slots, 0, recent, "interval", min(left, slots), low)] * layers


def _layersplit(policy: Any, slots: int, layers: int, tokens: int) -> list[Plan]:
    recent = min(policy.window_rows, slots // 4) if policy.recent is None else policy.recent
    window = Plan(slots, 0, min(recent, slots), "replace")
    return [Plan(None) if layer < policy.full_layers else window for layer in range(layers)]


def _snapkv(policy: Any, slots: int, layers: int, tokens: int) -> list[Plan]:
    return [Plan(slots, 0, min(policy.window, slots))] * layers


def _pyramid(policy: Any, slots: int, layers: int, tokens: int) -> list[Plan]:
    how = {"official": pyramid.official, "exact": pyramid.exact}[policy.rounding]
    counts = how(layers, slots, policy.window, policy.beta, tokens)
    return [Plan(count, 0, min(policy.window, count)) for count in counts]


def _expected(policy: Any, slots: int, layers: int, tokens: int) -> list[Plan]:
    return [Plan(slots, min(policy.sinks, slots - 1))] * layers


def _keydiff(policy: Any, slots: int, layers: int, tokens: int) -> list[Plan]:
    limit = slots + policy.block - 1
    return [Plan(limit, decode="interval", prefill=slots, low=slots)] * layers


def _rkv(policy: Any, slots: int, layers: int, tokens: int) -> list[Plan]:
    recent = min(policy.window, slots)
    return [Plan(slots + policy.buffer - 1, 0, recent, "interval", slots, slots)] * layers


def _duo(policy: Any, slots: int, layers: int, tokens: int) -> list[Plan]:
    return duo_plans(policy.gates, policy.sparsity, policy.sinks, policy.recent, slots)


def _planned(policy: Any, slots: int, layers: int, tokens: int) -> list[Plan]:
    plans = make_plans(policy.scorer, slots, layers, tokens)
    reserved = max(1, *(plan.sinks + plan.recent for plan in plans))
    counts = planned.slots(policy.shares, slots, reserved, tokens)
    return [
        replace(plan, heads=[Plan(n, plan.sinks, plan.recent) for n in row])
        for plan, row in zip(plans, counts, strict=True)
    ]


def _quest(policy: Any, slots: int, layers: int, tokens: int) -> list[Plan]:
    picked, dense = Plan(None, select=slots), Plan(None)
    return [dense if layer < policy.dense_layers else picked for layer in range(layers)]


_PLANS: dict[str, Callable[[Any, int, int, int], list[Plan]]] = {
    "full": _full,
    "kvzip": _full,
    "streaming": _streaming,
    "h2o": _h2o,
    "snapkv": _snapkv,
    "pyramid": _pyramid,
    "layersplit": _layersplit,
    "knorm": _plain,
    "random": _plain,
    "tova": _tova,
    "scissorhands": _scissorhands,
    "keyformer": _keyformer,
    "adakv": _wrapped,
    "criticalkv": _wrapped,
    "chunked": _wrapped,
    "expected": _expected,
    "keydiff": _keydiff,
    "rkv": _rkv,
    "duo": _duo,
    "planned": _planned,
    "quest": _quest,
}
