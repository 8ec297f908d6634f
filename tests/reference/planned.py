"""Shares of what is free [L, HK] -> slots [L][HK]: pour, cut what runs over, pour again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


def slots(
    shares: Sequence[Sequence[int]], budget: int, reserved: int, tokens: int
) -> list[list[int]]:
    """Slots of every head; a head holds `reserved` of them whatever its share."""
    cells = [(l, h) for l, row in enumerate(shares) for h in range(len(row))]
    if tokens <= budget:
        return [[budget] * len(row) for row in shares]
    if len(shares[0]) > 1 and all(min(row) == max(row) for row in shares):
        by_layer = slots([row[:1] for row in shares], budget, reserved, tokens)
        return [row * len(shares[0]) for row in by_layer]
    room = tokens - reserved
    amount = dict.fromkeys(cells, Fraction(0))
    rest = Fraction(len(cells) * (budget - reserved))
    while rest:
        open_cells = [cell for cell in cells if amount[cell] < room]
        weights = {(l, h): shares[l][h] for l, h in open_cells}
        if not any(weights.values()):
            weights = dict.fromkeys(open_cells, 1)
        poured, total, spilt = rest, sum(weights.values()), Fraction(0)
        for cell in open_cells:
            amount[cell] += poured * weights[cell] / total
            spilt += max(Fraction(0), amount[cell] - room)
            amount[cell] = min(amount[cell], Fraction(room))
        rest = spilt
    counts = {cell: math.floor(amount[cell]) for cell in cells}
    missing = len(cells) * (budget - reserved) - sum(counts.values())
    for cell in sorted(cells, key=lambda c: (counts[c] - amount[c], c))[:missing]:
        counts[cell] += 1
    return [[reserved + counts[l, h] for h in range(len(row))] for l, row in enumerate(shares)]
