"""Slots where they gain most: the split of a total that loses the least.

    minimise  sum_c l_c(k_c)    subject to    sum_c k_c = total

for loss curves l_c on a grid of counts. Where they are convex the greedy rule is the optimum: all
steps of all cells in the order of what a slot of each gains, and the best ones until the total is
spent. A measured curve need not be convex (a ranking can find its best keys late), so a cell's
steps are first merged with their neighbours until gains fall along it: the slopes of the largest
convex curve below (pool adjacent violators). Ties go to the earlier step, then the earlier cell. No
random number, no iteration that could stop early.
"""

from __future__ import annotations

import numpy as np


def falling(gains: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Gains per slot [K] that never rise, of steps of `sizes` slots: merged where they would.

    gains: what each step adds, [K]. The total of gains is kept, and of every merged stretch.
    """
    merged: list[tuple[float, int, int]] = []  # gain, slots, steps of each stretch
    for gain, size in zip(gains.tolist(), sizes.tolist(), strict=True):
        stretch = (gain, size, 1)
        while merged and stretch[0] * merged[-1][1] > merged[-1][0] * stretch[1]:
            before = merged.pop()
            stretch = (before[0] + stretch[0], before[1] + stretch[1], before[2] + stretch[2])
        merged.append(stretch)
    return np.repeat([gain / size for gain, size, _ in merged], [steps for *_, steps in merged])


def best_counts(loss: np.ndarray, slots: np.ndarray, total: int, weight: int = 1) -> np.ndarray:
    """Slots int [C] of each cell for loss curves [C, K] at kept counts `slots` [K].

    total: slots of all cells together, weight: real slots that one of a cell stands for (the heads
    of a layer that are given the same). Every cell has slots[0]. The last step that is bought is
    cut so that the sum is exact; what is left below `weight` is not given out.

    Raises:
        ValueError: a total that does not pay for slots[0] of every cell, or is above all.
    """
    cells, least, most = len(loss), int(slots[0]), int(slots[-1])
    units = total // weight
    if not cells * least <= units <= cells * most:
        raise ValueError(
            f"expected a total from {cells * least * weight} to {cells * most * weight} slots, got "
            f"{total}"
        )
    sizes = np.diff(slots)
    slopes = np.stack([falling(-np.diff(curve), sizes) for curve in loss])  # [C, K - 1]
    # By falling slope; then by step, then by cell: a cell's steps come in their order.
    cell, step = np.divmod(np.arange(slopes.size), len(sizes))
    order = np.lexsort((cell, step, -slopes.ravel()))
    counts, left = np.full(cells, least), units - cells * least
    for i in order:
        size = min(int(sizes[step[i]]), left)
        counts[cell[i]] += size
        left -= size
        if not left:
            break
    return counts


def lost(loss: np.ndarray, slots: np.ndarray, counts: np.ndarray) -> float:
    """Sum over cells of what curves [C, K] say of `counts` [C], linear between grid points."""
    return sum(float(np.interp(n, slots, row)) for n, row in zip(counts, loss, strict=True))
