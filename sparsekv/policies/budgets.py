"""Budgets in exact arithmetic: how many slots a row, and each of its layers, may keep.

Integers and fractions only, no tensor: a plan is the same on every machine, its sum checkable.

Pyramid (PyramidKV, arXiv 2406.02069). C slots a layer on average, w of them the window that every
layer keeps; B = C - w are left for layers l = 0 .. L-1, most of them at the bottom:

    low = B // beta        high = 2 B - low        b_l = high - (high - low) l / (L - 1)

so that the b_l sum to L B. The budgets returned here include the window: b_l + w.

Planned: any shares of what is free, by layer and KV head, cut at what a prompt has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from sparsekv.policies.base import positive


def exact(value: float) -> Fraction:
    """The decimal the user wrote: 0.2 is 1/5, not 0.2000000000000000111."""
    return Fraction(repr(float(value)))


def resolve_budget(budget: int | float, tokens: int) -> int:
    """Slots kept per KV head of a row of `tokens` real tokens (padding excluded), at least 1.

    An int is that many slots (it may exceed `tokens`); a float in (0, 1] is the fraction of the
    tokens KEPT, rounded half up. So 1 is one slot and 1.0 is everything.
    """
    positive("tokens", tokens, at_least=0)
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise ValueError(f"expected budget to be an int >= 1 or a float in (0, 1], got {budget!r}")
    if isinstance(budget, int):
        positive("budget", budget)
        return budget
    if not 0.0 < budget <= 1.0:  # NaN fails here too
        raise ValueError(f"expected a float budget in (0, 1], the fraction kept, got {budget!r}")
    return max(1, math.floor(exact(budget) * tokens + Fraction(1, 2)))


def parse_budget(text: str) -> int | float:
    """ "512" -> 512, "0.25" -> 0.25; ValueError for what is not a budget."""
    try:
        budget = int(text) if text.strip().lstrip("+-").isdigit() else float(text)
    except ValueError as error:
        raise ValueError(f"expected a budget like 512 or 0.25, got {text!r}") from error
    resolve_budget(budget, 1)
    return budget


def largest_remainder(targets: Sequence[Fraction], total: int) -> list[int]:
    """Integers that sum to `total`: every target floored, the rest to the largest fractions.

    Ties go to the lower index, so non-increasing targets stay non-increasing.
    """
    floors = [math.floor(target) for target in targets]
    rest = total - sum(floors)
    if not 0 <= rest <= len(floors):
        raise ValueError(f"expected targets that sum to {total}, got {float(sum(targets))}")
    by_fraction = sorted(range(len(floors)), key=lambda i: (floors[i] - targets[i], i))
    for i in by_fraction[:rest]:
        floors[i] += 1
    return floors


def pyramid_exact(num_layers: int, tokens: int, budget: int, window: int, beta: int) -> list[int]:
    """The pyramid with sum exactly num_layers * budget, non-increasing, each in [window, tokens].

    Where the lowest layer would keep more than all tokens, the ramp is flattened until it keeps
    just those (the published clamp); it stays linear and keeps its sum. Uniform when no pyramid
    exists: one layer, budget <= window, or tokens <= budget.
    """
    free = budget - window
    if num_layers == 1 or free < 1 or tokens <= budget:
        return [budget] * num_layers
    high = min(2 * free - free // beta, tokens - window)
    low = 2 * free - high
    ramp = [high - Fraction((high - low) * l, num_layers - 1) for l in range(num_layers)]
    counts = largest_remainder(ramp, num_layers * free)
    return [count + window for count in counts]


def pyramid_official(
    num_layers: int, tokens: int, budget: int, window: int, beta: int
) -> list[int]:
    """The pyramid as the released code rounds it: a floored step, hence a sum above L * budget.

    It is over budget by 4.3 % at L=32, C=128 and by 27.3 % at L=80, C=128 (w=8), and uniform for
    budget <= tokens < 2 (budget - window). Only for comparison with published numbers.
    """
    free = budget - window
    if num_layers == 1 or free < 1 or tokens < max(budget, 2 * free):
        return [budget] * num_layers
    low = free // beta
    high = 2 * free - low
    if high >= tokens - window:
        high = tokens - window
        low = 2 * free - high
    step = (high - low) // (num_layers - 1)
    return [high - step * l + window for l in range(num_layers)]


def planned_exact(
    shares: Sequence[Sequence[int]], tokens: int, budget: int, reserved: int
) -> list[list[int]]:
    """Slots [layers][heads], cells * budget in all, each from `reserved` to `tokens`.

    What is free, cells * (budget - reserved), goes by share; what a cell cannot hold goes to the
    others by theirs, and evenly once only cells without a share are left. Where the heads of every
    layer have equal shares they get equal slots. Uniform when tokens <= budget.
    """
    heads = len(shares[0])
    if tokens <= budget:
        return [[budget] * heads for _ in shares]
    if heads > 1 and all(len(set(layer)) == 1 for layer in shares):
        rows = planned_exact([layer[:1] for layer in shares], tokens, budget, reserved)
        return [row * heads for row in rows]
    flat = [share for layer in shares for share in layer]
    room, free = tokens - reserved, len(flat) * (budget - reserved)
    left, weight = free, sum(flat)
    targets = [Fraction(0)] * len(flat)
    waiting = sorted(range(len(flat)), key=lambda i: -flat[i])  # the first to be full come first
    for place, i in enumerate(waiting):
        if weight and flat[i] * left < room * weight:  # neither it nor any later cell is full
            for j in waiting[place:]:
                targets[j] = Fraction(flat[j] * left, weight)
            break
        if not weight:
            for j in waiting[place:]:
                targets[j] = Fraction(left, len(flat) - place)
            break
        targets[i], left, weight = Fraction(room), left - room, weight - flat[i]
    counts = [reserved + count for count in largest_remainder(targets, free)]
    return [counts[start : start + heads] for start in range(0, len(counts), heads)]
