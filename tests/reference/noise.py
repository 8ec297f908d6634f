"""Counter-based random numbers: the same for any batch, order and number of draws.

h <- mix(h + 0x9E3779B9 * (value + 1)) over the values of a counter, from h = 0, all in uint32;
mix is lowbias32. Values are integers or integer arrays that broadcast.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def mix(x: np.ndarray) -> np.ndarray:
    """lowbias32 of uint32 numbers."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def hashed(*counter: Any) -> np.ndarray:
    """uint32 of a counter such as (seed, layer, head, i, j), shaped as its values broadcast."""
    h = np.zeros(1, dtype=np.uint32)
    for value in counter:
        step = np.asarray(value, dtype=np.uint32).reshape(np.shape(value) or 1) + np.uint32(1)
        h = mix(h + np.uint32(0x9E3779B9) * step)
    return h


def uniform(*counter: Any) -> np.ndarray:
    """float64 in (0, 1)."""
    return ((hashed(*counter) >> np.uint32(9)) + 0.5) * 2.0**-23


def gumbel(*counter: Any) -> np.ndarray:
    """Standard Gumbel(0, 1), float64."""
    return -np.log(-np.log(uniform(*counter)))
