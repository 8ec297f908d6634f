"""Counter-based noise: a number is a function of what it is for; runs repeat, no state is kept.

    h(a, b, ..)  = fold(.. fold(fold(0, a), b) ..)        fold(h, v) = mix(h + 0x9E3779B9 (v + 1))
    u            = (floor(h / 2^9) + 1/2) / 2^23          uniform, in (0, 1): exact in fp32
    zeta         = -ln(-ln u)                             standard Gumbel, within -2.9 .. 16.7

All in uint32 arithmetic; mix is Wellons' "lowbias32". Gumbel noise of a logit is drawn for
(seed, layer, query head, query position, key position), whatever the batch, chunk or tile.

23 bits, not 24: (2^24 - 1) + 1/2 would round to 2^24, u to 1 and zeta to infinity.
The jit functions and the torch ones below give the same bits up to u; logarithms differ by ulps.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_UINT32 = 0xFFFFFFFF
_STEP, _FIRST, _SECOND = 0x9E3779B9, 0x7FEB352D, 0x846CA68B


@triton.jit
def mix(h):
    """Every bit of h uint32 reaches every bit of the answer; a bijection."""
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def fold(h, value):
    """The hash of (what h is the hash of, value): uint32 of the broadcast shape."""
    return mix(h + 0x9E3779B9 * (tl.cast(value, tl.uint32) + 1))


@triton.jit
def uniform(h):
    """u fp32 of h uint32: the mantissa of 1 .. 2 is filled, then 1 - 2^-24 taken off, exactly."""
    mantissa = (h >> 9) | 0x3F800000
    return mantissa.to(tl.float32, bitcast=True) - 0.999999940395355224609375


@triton.jit
def log2_normal(x):
    """log2 of positive normal fp32, to 3e-7 of the answer, near x = 1 too: no branches.

    The hardware's log2 is only good to 2^-22 there, the library's asks about zeros and infinities.
    log2(1 + r) / r is a polynomial through 8 Chebyshev points of [-1/3, 1/3].
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) >> 23  # x = 2^exponent (1 + r), 2/3 <= 1 + r < 4/3
    r = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    p = 0.24672696 - 0.21699235 * r
    p = p * r - 0.23779968
    p = p * r + 0.28560446
    p = p * r - 0.36073358
    p = p * r + 0.48096458
    p = p * r - 0.72134731
    p = p * r + 1.44269481
    return p * r + exponent.to(tl.float32)


@triton.jit
def gumbel2(h):
    """log2(e) zeta fp32 of h uint32: what a base-2 logit is perturbed by.

    log2(-ln u) = log2(-log2 u) + log2(ln 2).
    """
    return 0.5287663729448977 - log2_normal(-log2_normal(uniform(h)))


def stream(*values: int) -> int:
    """The hash of some integers as a signed int32, which is what kernels take."""
    h = 0
    for value in values:
        h = (h + _STEP * (value + 1)) & _UINT32
        h = ((h ^ (h >> 16)) * _FIRST) & _UINT32
        h = ((h ^ (h >> 15)) * _SECOND) & _UINT32
        h ^= h >> 16
    return _signed(h)


def fold_reference(h: int | Tensor, value: Tensor) -> Tensor:
    """`fold` in torch, where int32 wraps around like uint32; h and value int32, broadcast."""
    x = (value + 1).mul_(_signed(_STEP)) + h
    x.bitwise_xor_(_shift(x, 16)).mul_(_FIRST)
    x.bitwise_xor_(_shift(x, 15)).mul_(_signed(_SECOND))
    return x.bitwise_xor_(_shift(x, 16))


def uniform_reference(h: Tensor) -> Tensor:
    """`uniform` in torch: fp32 of h int32."""
    return _shift(h, 9).float().add_(0.5).mul_(2.0**-23)


def gumbel_reference(h: Tensor) -> Tensor:
    """zeta fp32 of h int32."""
    return uniform_reference(h).log_().neg_().log_().neg_()


def _shift(x: Tensor, bits: int) -> Tensor:
    """x >> bits without the sign."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x
