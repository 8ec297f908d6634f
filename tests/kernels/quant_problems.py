"""Quantised paged caches for the kernel tests: a plain one, quantised slot by slot."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from paged_problems import DEVICE, HUGE, Paged
from torch import Tensor

from sparsekv.kernels._quant import KV_FORMATS, arch_of, dequantise, quantise, raw

FORMATS = [
    name for name in KV_FORMATS if name != "fp8_e4m3" or arch_of(torch.device(DEVICE)) != "sm80"
]


@dataclass
class Quantised:
    """cache: quantised pages; its dense k and v are what they stand for, in fp32."""

    cache: Paged
    k_scales: Tensor  # fp32 [N, P]
    v_scales: Tensor

    @property
    def scales(self) -> dict[str, Tensor]:
        return {"k_scales": self.k_scales, "v_scales": self.v_scales}

    def clone(self) -> Quantised:
        k, v, positions, scores = self.cache.pool
        pool = {"k_pages": k.clone(), "v_pages": v.clone()}
        pool |= {"positions": positions.clone(), "scores": scores.clone()}
        cache = replace(self.cache, **pool, lens=self.cache.lens.clone())
        return Quantised(cache, self.k_scales.clone(), self.v_scales.clone())

    def everything(self) -> list[Tensor]:
        """All tensors that a kernel may write, pages as bytes."""
        k, v, positions, scores = self.cache.pool
        return [raw(k), raw(v), positions, scores, self.k_scales, self.v_scales]


def quantised(cache: Paged, name: str) -> Quantised:
    """The same cache in that format. Unowned slots hold the worst bytes and NaN scales."""
    form = KV_FORMATS[name]
    unowned = cache.positions == HUGE
    pages, scales, dense = [], [], []
    for x, table in ((cache.k_pages, cache.block_table), (cache.v_pages, cache.block_table)):
        q, scale = quantise(x.nan_to_num(0.0), form)
        raw(q)[unowned] = 0x7F if form.dtype != torch.uint8 else 0xFF
        scale[unowned] = torch.nan
        pages.append(q)
        scales.append(scale)
        dense.append(dequantise(q, scale, torch.float32)[table.long()].flatten(2, 3))
    changed = replace(cache, k_pages=pages[0], v_pages=pages[1], k=dense[0], v=dense[1])
    return Quantised(changed, *scales)
