"""Counter-based noise: a number is a function of what it is for, so runs repeat.

    h(a, b, ..)  = fold(.. fold(fold(0, a), b) ..)       fold(h, v) = mix(h + 0x9E3779B9 (v + 1))
    mix          = x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16
    uniform      = (floor(h / 2^9) + 1/2) / 2^23         in (0, 1) and exact in fp32
    gumbel       = -ln(-ln uniform)                      standard Gumbel, within -2.9 .. 16.7

All in uint32 arithmetic; mix is Wellons' "lowbias32". `sparsekv/kernels/_noise.py` draws the same
numbers in Triton. 23 bits, for with 24 (2^24 - 1) + 1/2 would round to 2^24 and u to 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def mix(h: Tensor) -> Tensor:
    """Every bit of h reaches every bit of the answer. h: int64 holding uint32 values."""
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK  # int64 wraps around, which the low bits survive
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _MASK
    return h ^ (h >> 16)


def uniform(*values: int | Tensor) -> Tensor:
    """u fp32 of the broadcast shape of `values`, at least one of them an integer tensor.

    For instance uniform(seed, layer, heads, positions).
    """
    h = next(value for value in values if isinstance(value, Tensor)).new_zeros(
        (), dtype=torch.int64
    )
    for value in values:
        value = value.long() if isinstance(value, Tensor) else value
        h = mix((h + 0x9E3779B9 * ((value + 1) & _MASK)) & _MASK)
    return ((h >> 9).float() + 0.5) * 2.0**-23


def gumbel(*values: int | Tensor) -> Tensor:
    """zeta fp32 of the broadcast shape of `values`, see `uniform`."""
    return -(-uniform(*values).log()).log()
