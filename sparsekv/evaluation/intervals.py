"""Bootstrap over contexts: questions about one context stand or fall together.

A draw takes as many contexts as there are, with replacement, and the mean over all their questions.
Every setting of a task is drawn with the same contexts, so a difference between two is paired, and
95 % of the draws lie in its interval. Tasks are drawn independently of each other, so that contexts
of one, which have nothing to do with those of another, cannot seem to rise and fall with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from zlib import crc32

import numpy as np

_SEED, _DRAWS = 0, 4000


@dataclass(frozen=True)
class Sums:
    """Of one task: total float [C] over the questions of each context, count int [C]."""

    total: np.ndarray
    count: np.ndarray

    @property
    def mean(self) -> float:
        """Over all questions."""
        return float(self.total.sum() / self.count.sum())

    @property
    def alone(self) -> bool:
        """Whether there is one context, of which draws cannot tell how others would differ."""
        return len(self.total) < 2

    def draws(self, task: str = "") -> np.ndarray:
        """Means float [draws]; those of one task are paired."""
        weights = _weights(len(self.total), task)
        return (weights @ self.total) / (weights @ self.count)


def interval(draws: np.ndarray) -> tuple[float, float]:
    """The central 95 % of draws."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


@lru_cache(maxsize=32)
def _weights(contexts: int, task: str) -> np.ndarray:
    """How often each draw takes each context, float [draws, C]; by C and task always the same."""
    rng = np.random.default_rng([_SEED, contexts, crc32(task.encode())])
    even = np.full(contexts, 1 / contexts)
    weights = rng.multinomial(contexts, even, size=_DRAWS).astype(float)
    weights.setflags(write=False)
    return weights
