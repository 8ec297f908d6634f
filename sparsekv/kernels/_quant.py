"""Quantised K and V: one fp32 scale per (slot, KV head) for K, one for V; no zero points.

For a vector x of D values, in fp32 and with every division and rounding as IEEE says:

    scale = max(max_d |x_d| / limit, 2^-100),   q_d = round(x_d / scale),   x_d ~ scale * q_d

    int8      limit 127     round to the nearest integer, ties to even
    int4      limit 7       the same; q + 8 in 4 bits: byte d holds dims d (low) and d + D/2 (high)
    fp8_e4m3  limit 448     round to the nearest 8-bit float, ties to even
    fp8_e5m2  limit 57344   the same

so |scale * q_d - x_d| <= scale / 2 for integers and 2^-4 |x_d| (2^-3 for e5m2) for normal floats,
and zeros stay zeros. A kernel multiplies a column of q.k by K's scale and a column of P by V's: a
dequantised tile exists nowhere. The torch functions are the definition, the jit functions equal
them bit by bit: rounding is spelt out, since casts to 8-bit floats differ between targets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import arch_of, check_dtype, check_shape

_SMALLEST = tl.constexpr(2.0**-100)
_MAGIC = tl.constexpr(1.5 * 2.0**23)  # x + _MAGIC has no room for a fraction


@dataclass(frozen=True)
class KVFormat:
    """How a vector is stored. pointer: type in a Triton signature; packed: two values a byte."""

    name: str
    dtype: torch.dtype
    limit: float
    pointer: str
    packed: bool = False

    @property
    def unit(self) -> float:
        """A power of two near limit / 2: P * scale * unit is about P, whatever P's dtype holds."""
        return 2.0 ** (math.frexp(self.limit)[1] - 2)


KV_FORMATS = {
    form.name: form
    for form in (
        KVFormat("fp8_e4m3", torch.float8_e4m3fn, 448.0, "*fp8e4nv"),
        KVFormat("fp8_e5m2", torch.float8_e5m2, 57344.0, "*fp8e5"),
        KVFormat("int8", torch.int8, 127.0, "*i8"),
        KVFormat("int4", torch.uint8, 7.0, "*u8", packed=True),
    )
}
_BY_DTYPE = {form.dtype: form for form in KV_FORMATS.values()}
_NO_E4M3 = ("sm80",)  # tensor cores before 8.9 know no such type, and triton does not emulate it


def kv_format(
    kv_dtype: str, head_dim: int | None = None, device: torch.device | None = None
) -> KVFormat:
    """The format of that name.

    Raises:
        ValueError: an unknown name, or a head_dim or device (where given) that it cannot serve.
    """
    if kv_dtype not in KV_FORMATS:
        raise ValueError(
            f"expected kv_dtype to be None or one of {[*KV_FORMATS]}, got {kv_dtype!r}"
        )
    form = KV_FORMATS[kv_dtype]
    if form.packed and head_dim is not None and head_dim % 16:
        raise ValueError(f"expected a head_dim that is a multiple of 16 for int4, got {head_dim}")
    if kv_dtype == "fp8_e4m3" and device is not None and arch_of(device) in _NO_E4M3:
        raise ValueError("expected a GPU of capability >= 8.9 for fp8_e4m3, got 8.0; use fp8_e5m2")
    return form


def check_kv_dtype(kv_dtype: str | None) -> None:
    """Raise ValueError unless kv_dtype is None or the name of a format."""
    if kv_dtype is not None:
        kv_format(kv_dtype)


def formats_of(arch: str) -> list[KVFormat]:
    """The formats that an arch of `ARCHS` can serve."""
    return [f for name, f in KV_FORMATS.items() if name != "fp8_e4m3" or arch not in _NO_E4M3]


def format_of(pages: Tensor) -> KVFormat | None:
    """The format of quantised pages; None for plain ones."""
    return _BY_DTYPE.get(pages.dtype)


def raw(x: Tensor) -> Tensor:
    """The same memory, as bytes if x is quantised: what indexing and kernels can move anywhere."""
    return x.view(torch.uint8) if x.dtype in _BY_DTYPE else x


def quantise(x: Tensor, form: KVFormat) -> tuple[Tensor, Tensor]:
    """x [..., D] as (form.dtype [..., D], or [..., D/2] if packed, scales fp32 [...])."""
    x = x.float()
    amax = x.abs().amax(-1)
    # A tensor of limits: torch on a GPU divides by a number through its rounded reciprocal.
    scale = (amax / torch.full_like(amax, form.limit)).clamp_min(_SMALLEST.value)
    q = x / scale[..., None]
    if form.dtype.is_floating_point:
        return q.to(form.dtype), scale
    q = q.round().to(torch.int8)
    if form.packed:
        low, high = (q + 8).to(torch.uint8).chunk(2, dim=-1)
        q = low | high << 4
    return q, scale


def dequantise(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """scale * q in `dtype`, [..., D], from what `quantise` gave; the product is fp32."""
    if q.dtype == torch.uint8:
        q = torch.cat([q & 15, q >> 4], dim=-1).to(torch.int8) - 8
    return (q.float() * scale[..., None]).to(dtype)


def check_scales(k_pages: Tensor, k_scales: Tensor | None, v_scales: Tensor | None) -> None:
    """Raise ValueError unless quantised pages [N,P,W] have fp32 scales [N,P] and others none."""
    given = (k_scales is not None, v_scales is not None)
    if given != ((True, True) if format_of(k_pages) else (False, False)):
        raise ValueError(
            f"expected k_scales and v_scales beside quantised pages only, got pages of "
            f"{k_pages.dtype} and scales {given}"
        )
    for name, x in (("k_scales", k_scales), ("v_scales", v_scales)):
        if x is None:
            continue
        check_shape(name, x, k_pages.shape[:2])
        check_dtype(name, x, torch.float32)
        if not x.is_contiguous():  # written in place: a copy would be lost
            raise ValueError(f"expected contiguous {name}, got strides {x.stride()}")


def stored_width(form: KVFormat | None, head_dim: int) -> int:
    """Elements of a page row that hold head_dim values."""
    return head_dim // 2 if form is not None and form.packed else head_dim


# ---------------------------------------------------------------------- inside kernels


@triton.jit
def _round_float(x, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """x fp32 to the nearest float of MANTISSA bits and that smallest normal exponent; even ties."""
    drop: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    normal = (bits + (1 << (drop - 1)) - 1 + ((bits >> drop) & 1)) & -(1 << drop)
    step: tl.constexpr = 2.0 ** (MIN_EXPONENT - MANTISSA)
    subnormal = ((tl.abs(x) + _MAGIC * step) - _MAGIC * step).to(tl.int32, bitcast=True)
    subnormal |= bits & -(1 << 31)  # keeps the sign of a zero
    bits = tl.where(tl.abs(x) < 2.0**MIN_EXPONENT, subnormal, normal)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _round(x, element: tl.constexpr):
    """x fp32 to the nearest value of the stored type, still in fp32."""
    if element == tl.float8e4nv:
        return _round_float(x, 3, -6)
    if element == tl.float8e5:
        return _round_float(x, 2, -14)
    return (x + _MAGIC) - _MAGIC


@triton.jit
def store_quantised(
    source,  # pointers to vectors [R], of W values (2 W if packed)
    target,  # pointers to page rows [R], of W elements
    scales,  # pointers to their scales [R], fp32
    rows,  # bool [R]
    LIMIT: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Quantise vectors of any float type on their way into pages."""
    element: tl.constexpr = target.dtype.element_ty
    offs = tl.arange(0, BLOCK_W)
    tile = rows[:, None] & (offs < W)[None, :]
    source, target = source[:, None] + offs[None, :], target[:, None] + offs[None, :]
    x = tl.load(source, mask=tile, other=0.0).to(tl.float32)  # [R, BLOCK_W]
    amax = tl.max(tl.abs(x), 1)
    if element == tl.uint8:
        upper = tl.load(source + W, mask=tile, other=0.0).to(tl.float32)
        amax = tl.maximum(amax, tl.max(tl.abs(upper), 1))
    scale = tl.maximum(tl.div_rn(amax, LIMIT), _SMALLEST)  # [R]
    tl.store(scales, scale, mask=rows)
    q = _round(tl.div_rn(x, scale[:, None]), element)
    if element == tl.uint8:
        q += 8.0 + 16.0 * (_round(tl.div_rn(upper, scale[:, None]), element) + 8.0)
        tl.store(target, q.to(tl.int32).to(tl.uint8), mask=tile)
    else:
        tl.store(target, q.to(element), mask=tile)
