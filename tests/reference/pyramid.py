"""PyramidKV's budgets, which fall linearly over depth: as published, or exact to the slot."""

from __future__ import annotations

import math
from fractions import Fraction


def official(layers: int, slots: int, window: int, beta: int, tokens: int) -> list[int]:
    """The published integer arithmetic, window included."""
    free = slots - window
    if layers == 1 or free < 1 or tokens < max(slots, 2 * free):
        return [slots] * layers
    low = free // beta
    high = 2 * free - low
    if high >= tokens - window:
        high, low = tokens - window, 2 * free - (tokens - window)
    return [high - l * ((high - low) // (layers - 1)) + window for l in range(layers)]


def exact(layers: int, slots: int, window: int, beta: int, tokens: int) -> list[int]:
    """The same line, rounded by largest remainders (ties to lower layers): the sum is L * slots."""
    free = slots - window
    if layers == 1 or free < 1 or tokens <= slots:
        return [slots] * layers
    low = free // beta
    if 2 * free - low > tokens - window:  # the lowest layer keeps all there is
        low = 2 * free - (tokens - window)
    targets = [
        Fraction(2 * free - low) - Fraction((2 * free - 2 * low) * l, layers - 1)
        for l in range(layers)
    ]
    counts = largest_remainders(targets, free * layers)
    return [count + window for count in counts]


def largest_remainders(targets: list[Fraction], total: int) -> list[int]:
    """Integers near `targets` that sum to `total`; of equal remainders the first is rounded up."""
    counts = [math.floor(target) for target in targets]
    order = sorted(range(len(targets)), key=lambda i: (counts[i] - targets[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts
