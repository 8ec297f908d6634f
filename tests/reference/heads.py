"""Ada-KV: the budget of a layer, shared out among its heads by one ranking over all of them."""

from __future__ import annotations

from fractions import Fraction

from reference.pyramid import largest_remainders
from reference.types import Head


def best(scores: list[Head], count: int) -> list[tuple[int, int]]:
    """The `count` best (head, position) of a layer; of equal scores the newer, then lower head."""
    cells = [(-score, -j, h) for h, head in enumerate(scores) for j, score in head.items()]
    return [(h, -j) for _, j, h in sorted(cells)[:count]]


def top(scores: Head, count: int) -> set[int]:
    """The `count` best positions of one head; of equal scores the newer."""
    return set(sorted(scores, key=lambda j: (-scores[j], -j))[:count])


def shares(scores: list[Head], total: int) -> list[int]:
    """How many of the `total` best of the layer fall in each head."""
    chosen = [h for h, _ in best(scores, total)]
    return [chosen.count(h) for h in range(len(scores))]


def mixed(scores: list[Head], base: int, floor: Fraction) -> list[int]:
    """(1 - floor) * share + floor * base, by largest remainders; sum exactly len(scores) * base.

    A head that has fewer keys than that keeps them all, and the others share the rest.
    """
    available = [len(head) for head in scores]
    total = min(base * len(scores), sum(available))
    share = shares(scores, total)
    targets = [
        min((1 - floor) * f + floor * base, Fraction(n))
        for f, n in zip(share, available, strict=True)
    ]
    missing = total - sum(targets)
    while missing > 0:  # only where a head is short of keys
        room = [h for h, n in enumerate(available) if targets[h] < n]
        for h in room:
            targets[h] = min(targets[h] + missing / len(room), Fraction(available[h]))
        missing = total - sum(targets)
    return largest_remainders(targets, total)


def official(scores: list[Head], base: int, floor: float) -> list[int]:
    """The published rounding, which loses or gains entries."""
    low = int(base * floor)
    return [round(f * (1 - floor) + low) for f in shares(scores, base * len(scores))]


def safeguarded(scores: list[Head], base: int, floor: Fraction) -> list[int]:
    """The best int(floor * base) of each head are safe; the best of all others fill the layer."""
    safe = [top(head, int(floor * base)) for head in scores]
    total = min(base * len(scores), sum(len(head) for head in scores))
    others = [
        {j: s for j, s in head.items() if j not in kept}
        for head, kept in zip(scores, safe, strict=True)
    ]
    rest = shares(others, total - sum(len(kept) for kept in safe))
    return [len(kept) + more for kept, more in zip(safe, rest, strict=True)]


def normalised(scores: Head, base: int) -> Head:
    """Scores times the part of their sum that lies in the `base` best."""
    total = sum(scores.values())
    part = sum(scores[j] for j in top(scores, base)) / total if total else 1.0
    return {j: score * part for j, score in scores.items()}
