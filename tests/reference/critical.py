"""CriticalKV: part of a head's budget by score, the rest by score times what the value does."""

from __future__ import annotations

import math
from fractions import Fraction

from reference.heads import top
from reference.types import Head


def two_stages(scores: Head, norms: Head, budget: int, first: Fraction, epsilon: float) -> set[int]:
    """`budget` positions: int(first * budget) by s_j, then the best (s_j + epsilon) * u_j."""
    kept = top(scores, math.floor(first * budget))
    rest = {j: (s + epsilon) * norms[j] for j, s in scores.items() if j not in kept}
    return kept | top(rest, budget - len(kept))
