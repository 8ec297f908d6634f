"""Counter-based random numbers: the same for any batch, order and number of draws.

h <- mix(h + 0x9E3779B9 * (value + 1)) over the values of a counter, from h = 0, all in uint32;
mix is lowbias32. Plain Python integers here.
"""

from __future__ import annotations

import math

_MASK = 0xFFFFFFFF


def mix(x: int) -> int:
    """lowbias32."""
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK
    return x ^ x >> 16


def hashed(*counter: int) -> int:
    """uint32 of a counter such as (seed, layer, head, i, j)."""
    h = 0
    for value in counter:
        h = mix(h + 0x9E3779B9 * (value + 1) & _MASK)
    return h


def uniform(*counter: int) -> float:
    """In (0, 1)."""
    return ((hashed(*counter) >> 9) + 0.5) * 2.0**-23


def gumbel(*counter: int) -> float:
    """Standard Gumbel(0, 1)."""
    return -math.log(-math.log(uniform(*counter)))
