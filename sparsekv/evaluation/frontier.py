"""Accuracy against memory: the points of all settings, and those that nothing dominates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sparsekv.evaluation.lines import Line


@dataclass(frozen=True)
class Point:
    """ratio: KV bytes to dense. score: of an average; low, high: the interval of its difference to
    dense, put around the score, or the score where there is none."""

    protocol: str
    policy: str
    budget: int | float | None
    ratio: float
    score: float
    low: float
    high: float


def points(averages: Iterable[Line]) -> list[Point]:
    """Of averages over all tasks; those of settings that refused a task are left out."""
    done = [line for line in averages if line.value is not None and line.ratio is not None]
    most: dict[str, int] = {}
    for line in done:
        most[line.protocol] = max(most.get(line.protocol, 0), line.tasks)
    found = []
    for line in done:
        if line.tasks == most[line.protocol] and line.value is not None and line.ratio is not None:
            dense = line.value - (line.difference or 0.0)
            ends = (line.low, line.high)
            low, high = (line.value if end is None else dense + end for end in ends)
            place = (line.protocol, line.policy, line.budget, line.ratio)
            found.append(Point(*place, line.value, low, high))
    return found


def frontier(found: Iterable[Point]) -> list[Point]:
    """By protocol and memory: the points that score more than all that need no more memory."""
    best: dict[str, float] = {}
    kept = []
    for point in sorted(found, key=lambda p: (p.protocol, p.ratio, -p.score)):
        if point.score > best.get(point.protocol, float("-inf")):
            best[point.protocol] = point.score
            kept.append(point)
    return kept
