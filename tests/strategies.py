"""Hypothesis strategies of attention problems: they draw shapes, options and a seed, not tensors.

Small draws shrink fast and print well; `Packed.tensors` makes the tensors of a draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

HAS_GPU = torch.cuda.is_available()
# The same test bodies run on the torch reference, on the Triton interpreter, and on the GPU.
IMPLEMENTATIONS = [
    "reference",
    pytest.param("interpreter", marks=pytest.mark.skipif(HAS_GPU, reason="kernels run on the GPU")),
    pytest.param("gpu", marks=pytest.mark.gpu),
]
DTYPES = {
    "reference": (torch.float32, torch.float16, torch.bfloat16),
    "interpreter": (torch.float32, torch.float16),  # it computes bf16 on raw bits
    "gpu": (torch.bfloat16, torch.float16, torch.float32),
}
# What kernels over vLLM's blocks are drawn for.
BLOCKS = {
    "kv_heads": st.integers(1, 2),
    "dim": st.sampled_from([16, 24, 64]),
    "size": st.sampled_from([16, 32]),
    "tokens_first": st.booleans(),
    "softcap": st.sampled_from([None, 5.0]),
    "reduction": st.sampled_from(["mean", "max", "sum"]),
    "seed": st.integers(0, 99),
}
VALUES = ("normal", "outliers", "huge key", "equal keys", "sharp", "zeros")
LAYOUTS = ("tokens", "heads", "fused")
# Interpreter tiles are 16 and 32, GPU tiles 32 to 128: lengths around their multiples.
_EDGES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 53)
_GPU_EDGES = (*_EDGES, 63, 64, 65, 127, 128, 129, 191, 257, 300)


def device_of(implementation: str) -> str:
    """Where the tensors of an implementation live."""
    return "cuda" if implementation == "gpu" else "cpu"


@dataclass(frozen=True)
class Packed:
    """Sequences packed into q [Tq, HQ, D] and k, v [Tk, HK, D], `gap` unused NaN tokens around."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    kv_heads: int = 1
    group: int = 2
    head_dim: int = 16
    gap: int = 0
    values: str = "normal"
    layout: str = "tokens"
    dtype: int = 0
    seed: int = 0
    causal: bool = True
    align: str = "right"
    window: int | None = None
    softcap: float | None = None
    sinks: float | None = None
    positions: bool = False

    def tensors(self, implementation: str) -> dict[str, Any]:
        """Keyword arguments of prefill_attention; padding tokens are NaN."""
        choices = DTYPES[implementation]
        kind = {"dtype": choices[self.dtype % len(choices)], "device": device_of(implementation)}
        rng = torch.Generator().manual_seed(self.seed)
        t: dict[str, Any] = {"softmax_scale": self.head_dim**-0.5}
        for side, lengths in (("q", self.lengths_q), ("k", self.lengths_k)):
            t[f"cu_seqlens_{side}"], t[f"seqused_{side}"] = self._lengths(lengths, kind["device"])
            t[f"max_seqlen_{side}"] = max(lengths, default=0)
        for name, lengths in (("q", self.lengths_q), ("k", self.lengths_k), ("v", self.lengths_k)):
            heads = self.kv_heads * (self.group if name == "q" else 1)
            t[name] = self._values(name, lengths, heads, rng).to(**kind)
            t[name] = relayout(t[name], self.layout)
        t |= {"causal": self.causal, "align": self.align, "window": self.window}
        t |= {"softcap": self.softcap, "sinks": None}
        if self.sinks is not None:
            noise = torch.randn(self.kv_heads * self.group, generator=rng)
            t["sinks"] = (noise + self.sinks).to(kind["device"])
        if self.positions:
            for side in ("q", "k"):
                drawn = torch.randint(0, 64, (t[side].shape[0],), generator=rng)
                t[f"positions_{side}"] = drawn.int().to(kind["device"])
        return t

    def _lengths(self, lengths: tuple[int, ...], device: str) -> tuple[Tensor, Tensor | None]:
        """(cu_seqlens, seqused); without gaps seqused is None."""
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length + self.gap)
        used = torch.tensor(lengths, dtype=torch.int32, device=device) if self.gap else None
        cu = torch.tensor(starts, dtype=torch.int32, device=device)
        return (cu + self.gap if self.gap else cu), used

    def _values(
        self, name: str, lengths: tuple[int, ...], heads: int, rng: torch.Generator
    ) -> Tensor:
        tokens = sum(lengths) + self.gap * (len(lengths) + 1)
        x = torch.randn(tokens, heads, self.head_dim, generator=rng)
        if self.values == "outliers":  # FlashAttention-3's law: rare entries a hundred times larger
            spikes = torch.rand(x.shape, generator=rng) < 1e-3
            x = torch.where(spikes, 10 * x, x)
        elif self.values == "sharp":
            x = x if name == "v" else 3 * x
        elif self.values == "zeros":
            x = torch.zeros_like(x)
        elif name == "k" and self.values == "equal keys" and tokens:
            x = x[:1].expand_as(x).clone()
        elif name == "k" and self.values == "huge key" and tokens:
            x[int(torch.randint(0, tokens, (), generator=rng))] *= 8
        padding, end = torch.ones(tokens, dtype=torch.bool), 0
        for length in lengths:
            padding[end + self.gap : end + self.gap + length] = False
            end += self.gap + length
        return x.masked_fill(padding[:, None, None], torch.nan)


def relayout(x: Tensor, layout: str) -> Tensor:
    """The same [T, H, D] values behind other strides: token-major, head-major, or a wider row."""
    if layout == "heads":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "fused":  # as a slice of a fused projection: an offset and a wider token stride
        wide = torch.full((x.shape[0], x.shape[1] + 2, x.shape[2]), torch.nan).to(x)
        wide[:, 1:-1] = x
        return wide[:, 1:-1]
    return x


@st.composite
def packed(draw: st.DrawFn, small: bool = False, **fixed: Any) -> Packed:
    """Packed problems with every option. small: few heads and sequences; fixed: given fields."""
    edges = _GPU_EDGES if HAS_GPU else _EDGES
    group = draw(st.sampled_from((1, 2) if small else (1, 2, 3, 4, 7, 8)))
    kv_heads = draw(st.sampled_from((1, 2, 3)[: max(1, 6 // group)]))
    count = draw(st.integers(1, 2 if small or kv_heads * group > 4 else 3))
    length = st.sampled_from(edges) | st.integers(0, edges[-1])
    lengths_k = tuple(draw(st.lists(length, min_size=count, max_size=count)))
    # Equal lengths, a short query against a long cache, or anything (more queries than keys too).
    shape = draw(st.sampled_from(("equal", "suffix", "any")))
    lengths_q = {
        "equal": lengths_k,
        "suffix": tuple(min(n, 5) for n in lengths_k),
        "any": tuple(draw(st.lists(length, min_size=count, max_size=count))),
    }[shape]
    causal = draw(st.sampled_from((True, True, False)))
    fields = {
        "lengths_q": lengths_q,
        "lengths_k": lengths_k,
        "kv_heads": kv_heads,
        "group": group,
        "head_dim": 16 if small else draw(st.sampled_from((16, 16, 64, 80))),
        "gap": draw(st.sampled_from((0, 3))),
        "values": draw(st.sampled_from(VALUES)),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "dtype": draw(st.integers(0, 2)),
        "seed": draw(st.integers(0, 2**16)),
        "causal": causal,
        "align": draw(st.sampled_from(("right", "left"))),
        "window": draw(st.sampled_from((None, None, 1, 2, 16, 33, 400))),
        "softcap": draw(st.sampled_from((None, None, 5.0, 30.0))),
        "sinks": draw(st.sampled_from((None, None, 0.0, 20.0, -20.0))),
        "positions": causal and draw(st.sampled_from((False, False, True))),
    }
    return Packed(**(fields | fixed))
