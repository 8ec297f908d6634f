"""The chunk kernel of paged decode over quantised pages; maths and chunks as in `decode.py`.

Pages are read as words of four values: int32 for 8-bit formats, int16 for int4. A word is taken
apart in registers, value s of every word making stream s: [BLOCK_N, D/4] of the dims

    8 bits:  4 j + s,        int4:  2 j + s // 2 + (s % 2) D / 2,        j = 0 .. D/4 - 1,

so q.k is the sum of four dots, and out four accumulators. A tile of bytes would cost more: the
second operand of P.V is read column by column, a byte at a time. K's scale multiplies a column of
q.k and V's a column of P, times V_UNIT so that fp16 holds it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from ._common import ARCHS, LOG2E, PDL_ARCHS, AotRow, aot_row, base2_logits, launch_options
from ._decode_merge import softmax_finish
from ._decode_plan import HEAD_DIMS, QUANTISED
from ._quant import KVFormat, formats_of


@triton.jit
def _stream(w, s: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Value s of words int [N, W], in dtype; scales are still to come.

    A nibble in the last bits of a 16-bit float of value 128 (bf16) or 1024 (fp16) adds itself.
    """
    if FORMAT == "int4":
        nibble = (w >> (4 * s)) & 15
        if dtype == tl.bfloat16:
            return (nibble | 0x4300).to(dtype, bitcast=True) - 136.0
        elif dtype == tl.float16:
            return (nibble | 0x6400).to(dtype, bitcast=True) - 1032.0
        else:
            return (nibble - 8).to(dtype)
    else:
        byte = (w >> (8 * s)).to(tl.int8)
        if FORMAT == "fp8_e4m3":
            return byte.to(tl.float8e4nv, bitcast=True).to(dtype)
        elif FORMAT == "fp8_e5m2":
            return byte.to(tl.float8e5, bitcast=True).to(dtype)
        else:
            return byte.to(dtype)


@triton.jit
def _dots(q0, q1, q2, q3, k, FORMAT: tl.constexpr):
    """q.k, fp32 [G, N], without K's scales."""
    x = tl.dot(q0, tl.trans(_stream(k, 0, FORMAT, q0.dtype)), input_precision="ieee")
    x = tl.dot(q1, tl.trans(_stream(k, 1, FORMAT, q0.dtype)), x, input_precision="ieee")
    x = tl.dot(q2, tl.trans(_stream(k, 2, FORMAT, q0.dtype)), x, input_precision="ieee")
    return tl.dot(q3, tl.trans(_stream(k, 3, FORMAT, q0.dtype)), x, input_precision="ieee")


@triton.jit
def _dims(s: tl.constexpr, words, D: tl.constexpr, FORMAT: tl.constexpr):
    """Dims of stream s."""
    if FORMAT == "int4":
        return 2 * words + (s // 2 + (s % 2) * (D // 2))
    return 4 * words + s


@triton.jit(do_not_specialize=["window"])
def quantised_decode_kernel(
    q,  # [B, HQ, D]
    k_pages,  # words [N, P, D/4]
    v_pages,  # words [N, P, D/4]
    k_scales,  # fp32 [N, P]
    v_scales,  # fp32 [N, P]
    block_table, seqlens, positions, q_positions, sinks, out, lse, weights, tile_max,
    stride_qb, stride_qh, stride_kn, stride_kp, stride_vn, stride_vp, stride_tb, stride_th,
    softmax_scale, softcap, window, capacity,
    D: tl.constexpr, BLOCK_W: tl.constexpr, FORMAT: tl.constexpr, V_UNIT: tl.constexpr,
    G: tl.constexpr, BLOCK_G: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr, ONE_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    kv_head, row, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = (row * tl.num_programs(0) + kv_head).to(tl.int64)
    n = tl.load(seqlens + group)
    start = chunk * CHUNK
    if (start >= n) & (chunk > 0):  # chunk 0 of an empty head writes its zeros
        return
    end = tl.minimum(n, start + CHUNK)

    offs_n, offs_w, offs_g = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_G)
    in_w, in_g = (offs_w < D // 4)[None, :], offs_g < G
    head = group * G + offs_g  # [BLOCK_G] in B * HQ
    table = block_table + row.to(tl.int64) * stride_tb + kv_head * stride_th
    rows, q_mask = in_g[:, None], in_g[:, None] & in_w
    q += (row.to(tl.int64) * stride_qb + (kv_head * G + offs_g) * stride_qh)[:, None]
    q0 = tl.load(q + _dims(0, offs_w, D, FORMAT)[None, :], mask=q_mask, other=0.0)
    q1 = tl.load(q + _dims(1, offs_w, D, FORMAT)[None, :], mask=q_mask, other=0.0)
    q2 = tl.load(q + _dims(2, offs_w, D, FORMAT)[None, :], mask=q_mask, other=0.0)
    q3 = tl.load(q + _dims(3, offs_w, D, FORMAT)[None, :], mask=q_mask, other=0.0)
    if positions is not None:
        oldest = tl.load(q_positions + row) - window  # visible: position > oldest
    if weights is not None:
        tiles = tl.cdiv(capacity, BLOCK_N)
        weights += group * G * capacity
        tile_max += group * G * tiles

    m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_G], tl.float32)
    acc0 = tl.zeros([BLOCK_G, BLOCK_W], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    page = tl.load(table + (start + offs_n) // P, mask=start + offs_n < end, other=0)
    for tile in range(start, end, BLOCK_N):
        slot = tile + offs_n  # [BLOCK_N]
        in_tile = slot < end
        page64, offset = page.to(tl.int64), slot % P  # page * stride passes 2^31 in a big pool
        ahead = slot + BLOCK_N
        page = tl.load(table + ahead // P, mask=ahead < end, other=0)
        k_ptrs = k_pages + (page64 * stride_kn + offset * stride_kp)[:, None] + offs_w[None, :]
        v_ptrs = v_pages + (page64 * stride_vn + offset * stride_vp)[:, None] + offs_w[None, :]
        k = tl.load(k_ptrs, mask=in_tile[:, None] & in_w, other=0)  # [BLOCK_N, BLOCK_W]
        v = tl.load(v_ptrs, mask=in_tile[:, None] & in_w, other=0)
        k_scale = tl.load(k_scales + page64 * P + offset, mask=in_tile, other=0.0)
        v_scale = tl.load(v_scales + page64 * P + offset, mask=in_tile, other=0.0)
        seen = in_tile
        if positions is not None:
            seen &= tl.load(positions + page64 * P + offset, mask=in_tile, other=0) > oldest
        dots = _dots(q0, q1, q2, q3, k, FORMAT) * k_scale[None, :]  # [BLOCK_G, BLOCK_N]
        x = base2_logits(dots, softmax_scale, softcap, HAS_SOFTCAP)
        x = tl.where(seen[None, :], x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # no visible key so far
        p = tl.exp2(x - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(p, 1)
        w = (p * (v_scale * V_UNIT)[None, :]).to(q0.dtype)
        alpha = alpha[:, None]
        acc0 = tl.dot(w, _stream(v, 0, FORMAT, w.dtype), acc0 * alpha, input_precision="ieee")
        acc1 = tl.dot(w, _stream(v, 1, FORMAT, w.dtype), acc1 * alpha, input_precision="ieee")
        acc2 = tl.dot(w, _stream(v, 2, FORMAT, w.dtype), acc2 * alpha, input_precision="ieee")
        acc3 = tl.dot(w, _stream(v, 3, FORMAT, w.dtype), acc3 * alpha, input_precision="ieee")
        m = m_new
        if weights is not None:
            w_ptrs = weights + offs_g[:, None] * capacity + slot[None, :]
            tl.store(w_ptrs, p.to(tl.float16), mask=rows & in_tile[None, :])
            tl.store(tile_max + offs_g * tiles + tile // BLOCK_N, m_new, mask=in_g)

    factor = tl.full([BLOCK_G], 1.0 / V_UNIT, tl.float32)[:, None]
    if ONE_CHUNK:
        sink = tl.full([BLOCK_G], float("-inf"), tl.float32)
        if sinks is not None:
            sink = tl.load(sinks + kv_head * G + offs_g, mask=in_g, other=0.0).to(tl.float32)
            sink = sink * LOG2E
        factor, lse_rows = softmax_finish(m, l, factor, sink)
        tl.store(lse + head, lse_rows, mask=in_g)
    else:
        if PDL:
            gdc_launch_dependents()
        head = head * tl.num_programs(2) + chunk
        tl.store(lse + head * 2, m, mask=in_g)
        tl.store(lse + head * 2 + 1, l, mask=in_g)
    out += head[:, None] * D
    dtype = out.dtype.element_ty
    tl.store(out + _dims(0, offs_w, D, FORMAT)[None, :], (acc0 * factor).to(dtype), mask=q_mask)
    tl.store(out + _dims(1, offs_w, D, FORMAT)[None, :], (acc1 * factor).to(dtype), mask=q_mask)
    tl.store(out + _dims(2, offs_w, D, FORMAT)[None, :], (acc2 * factor).to(dtype), mask=q_mask)
    tl.store(out + _dims(3, offs_w, D, FORMAT)[None, :], (acc3 * factor).to(dtype), mask=q_mask)


def words(pages: Tensor) -> Tensor:
    """Quantised pages [N, P, ...] as words [N, P, D/4]."""
    return pages.view(torch.int16 if pages.dtype == torch.uint8 else torch.int32)


def word_shape(head_dim: int, form: KVFormat) -> dict[str, Any]:
    """The constexprs that pages of a format need."""
    block = max(16, triton.next_power_of_2(head_dim // 4))
    return {"BLOCK_W": block, "FORMAT": form.name, "V_UNIT": form.unit}


def quantised_signatures() -> list[AotRow]:
    """Rows of `aot_signatures`, with G = 4 and P = 16."""
    rows = []
    for arch in ARCHS:
        for d in HEAD_DIMS if arch == "sm90" else (128,):
            for form in formats_of(arch):
                rows.append(_aot_row(arch, d, form, full=True))
                rows += [_aot_row(arch, d, form, full=False)] * (arch == "sm90" and d >= 64)
    return rows


def _aot_row(arch: str, d: int, form: KVFormat, full: bool) -> AotRow:
    """full: all features; otherwise none."""
    types = dict.fromkeys(("q", "out") if full else ("q",), "*bf16")
    types |= dict.fromkeys(("k_pages", "v_pages"), "*i16" if form.packed else "*i32")
    types |= dict.fromkeys(("k_scales", "v_scales", "lse"), "*fp32")
    types |= {"block_table": "*i32", "seqlens": "*i32", "softmax_scale": "fp32", "softcap": "fp32"}
    types |= {"window": "i32", "capacity": "i32"}
    if full:
        types |= {"positions": "*i32", "q_positions": "*i32", "sinks": "*bf16"}
        types |= {"weights": "*fp16", "tile_max": "*fp32"}
    else:
        types["out"] = "*fp32"
    block_n, num_warps, num_stages = QUANTISED[arch, d]
    constexprs = {"D": d, "G": 4, "BLOCK_G": 16, "P": 16, "BLOCK_N": block_n, "CHUNK": 256}
    constexprs |= {"ONE_CHUNK": full, "HAS_SOFTCAP": full} | word_shape(d, form)
    constexprs["PDL"] = arch in PDL_ARCHS
    options = launch_options(num_warps, num_stages)
    return aot_row(quantised_decode_kernel, arch, types, constexprs, options)
