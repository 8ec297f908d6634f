"""What some policies score with (noisy column sums, projected values, near-duplicates), and the row
entropies of `sparsekv diagnose`.

Random keys have no near-duplicates, so that case is the slow one: every row walks over all keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsekv.bench.attention_inputs import Geometry, Packed, geometry, packed
from sparsekv.bench.case import Case, Context, name_of
from sparsekv.bench.prefill_cases import PREFILL
from sparsekv.bench.timing import copies
from sparsekv.kernels.perturb import perturbed_columns, perturbed_row
from sparsekv.kernels.prefill import prefill_attention
from sparsekv.kernels.projected_norm import projected_norm
from sparsekv.kernels.row_entropy import row_entropy
from sparsekv.kernels.similarity import nearest_duplicate

_THRESHOLD = 0.5  # R-KV's


def statistic_cases(tiny: bool) -> list[Case]:
    """Prompts of the attention cases, caches of usual budgets."""
    prompts = (96,) if tiny else (4096, 16384, 32768)
    caches = ((1, 128),) if tiny else ((1, 1152), (16, 1152), (1, 8192))
    return [
        *(_perturbed(tiny, t) for t in prompts),
        *(_projected(tiny, t) for t in prompts),
        *(_entropy(tiny, t) for t in prompts),
        *(_step(tiny, *shape) for shape in caches),
        *(_duplicates(tiny, *shape) for shape in caches),
    ]


def _perturbed(tiny: bool, t: int) -> Case:
    heads = geometry(tiny)
    return Case(
        "noisy scores of all rows",
        "statistics",
        {"B": 1, "T": t},
        lambda context: packed(context, 1, t),
        _perturbed_ours,
        flops=2.0 * heads.heads * t * t * heads.head_dim,
        roof="matmul",
        versus=name_of(PREFILL, {"B": 1, "T": t}),
    )


def _perturbed_ours(x: Packed, context: Context) -> Callable[[], Tensor]:
    return lambda: perturbed_columns(
        x.q, x.k, x.cu, x.cu, x.tokens, x.tokens, softmax_scale=x.heads.scale,
        seed=0, layer=0, tau=1.0,
    )  # fmt: skip


def _projected(tiny: bool, t: int) -> Case:
    heads = geometry(tiny)
    model_dim = heads.heads * heads.head_dim
    return Case(
        "projected values",
        "statistics",
        {"B": 1, "T": t},
        lambda context: (_draw(context, (1, heads.kv_heads, t)), _weight(context)),
        lambda inputs, context: lambda: projected_norm(*inputs),
        {"torch_by_head": lambda inputs, context: lambda: _torch_projected(*inputs)},
        flops=2.0 * t * heads.head_dim * model_dim * heads.heads,
        roof="matmul",
        versus=name_of(PREFILL, {"B": 1, "T": t}),
    )


def _entropy(tiny: bool, t: int) -> Case:
    heads = geometry(tiny)
    return Case(
        "entropy of all rows",
        "statistics",
        {"B": 1, "T": t},
        lambda context: packed(context, 1, t),
        _entropy_ours,
        {"attention_over_keys": _entropy_by_attention},
        flops=float(heads.heads * t * t * heads.head_dim),  # one of the two products of attention
        roof="matmul",
        versus=name_of(PREFILL, {"B": 1, "T": t}),
    )


def _entropy_ours(x: Packed, context: Context) -> Callable[[], Tensor]:
    lse = _over_keys(x)[1]
    return lambda: row_entropy(
        x.q, x.k, lse, x.cu, x.cu, x.tokens, x.tokens, softmax_scale=x.heads.scale
    )


def _entropy_by_attention(x: Packed, context: Context) -> Callable[[], Tensor]:
    """lse - scale q . (attention over the keys), which also remakes the lse."""

    def run() -> Tensor:
        mean, lse = _over_keys(x)
        return lse - x.heads.scale * torch.einsum("thd,thd->ht", x.q, mean).float()

    return run


def _over_keys(x: Packed) -> tuple[Tensor, Tensor]:
    lengths = (x.cu, x.cu, x.tokens, x.tokens)
    return prefill_attention(x.q, x.k, x.k, *lengths, softmax_scale=x.heads.scale)


def _torch_projected(v: Tensor, w_o: Tensor) -> Tensor:
    """One query head after the other, whose T x D_model product exists for a moment."""
    kv_heads = v.shape[1]
    blocks = w_o.unflatten(1, (kv_heads, -1, v.shape[3])).permute(1, 2, 3, 0)  # [HK, G, D, D_model]
    norms = [
        (v[:, h, None] @ blocks[h]).abs().sum(-1, dtype=torch.float32) for h in range(kv_heads)
    ]
    return torch.stack([norm.mean(1) for norm in norms], 1)


@dataclass(frozen=True)
class _Step:
    """Copies of probs fp32 [B, HQ, S], and what else a noisy step reads."""

    probs: list[Tensor]
    positions: Tensor
    lens: Tensor
    now: Tensor


def _step(tiny: bool, b: int, s: int) -> Case:
    heads = geometry(tiny)
    return Case(
        "noisy probabilities of a step",
        "statistics",
        {"B": b, "S": s},
        lambda context: _step_inputs(context, heads, b, s),
        _step_ours,
        measure="graph",
        bytes=2.0 * 4 * b * s * (heads.heads + heads.kv_heads),  # two passes; positions, columns
        roof="copy",
    )


def _step_inputs(context: Context, heads: Geometry, b: int, s: int) -> _Step:
    kind: dict[str, Any] = {"dtype": torch.int32, "device": context.device}
    generator = torch.Generator(context.device).manual_seed(0)
    shape = (b, heads.heads, s)
    draws = [
        torch.rand(shape, generator=generator, device=context.device)
        for _ in range(copies(4 * b * heads.heads * s, context))
    ]
    return _Step(
        [probs / probs.sum(-1, keepdim=True) for probs in draws],
        torch.arange(s, **kind).repeat(b, heads.kv_heads, 1),
        torch.full((b, heads.kv_heads), s, **kind),
        torch.full((b,), s, **kind),
    )


def _step_ours(x: _Step, context: Context) -> list[Callable[[], Tensor]]:
    ramp: dict[str, Any] = {"tau_start": 1.0, "tau_end": 2.0, "tau_steps": 128}

    def bind(probs: Tensor) -> Callable[[], Tensor]:
        return lambda: perturbed_row(
            probs, x.positions, x.lens, x.now, x.now, seed=0, layer=0, **ramp
        )

    return [bind(probs) for probs in x.probs]


def _duplicates(tiny: bool, b: int, s: int) -> Case:
    heads = geometry(tiny)
    return Case(
        "near-duplicates",
        "statistics",
        {"B": b, "S": s},
        lambda context: _draw(context, (b, heads.kv_heads, s)),
        _duplicates_ours,
        {"torch_n_by_n": lambda k, context: lambda: _torch_duplicates(k)},
        flops=2.0 * b * heads.kv_heads * s * s * heads.head_dim,
        roof="matmul",
    )


def _duplicates_ours(k: Tensor, context: Context) -> Callable[[], Any]:
    lens = torch.full(k.shape[:2], k.shape[2], dtype=torch.int32, device=k.device)
    return lambda: nearest_duplicate(k, lens, _THRESHOLD)


def _torch_duplicates(k: Tensor) -> Tensor:
    """As R-KV's code does: the whole matrix of cosines, then the last large one of each row."""
    unit = torch.nn.functional.normalize(k, dim=-1)
    near = (unit @ unit.transpose(-1, -2)) > _THRESHOLD
    near.diagonal(dim1=-2, dim2=-1).fill_(False)
    slot = torch.arange(k.shape[2], dtype=torch.int32, device=k.device)
    return torch.where(near, slot, -1).amax(-1)


def _draw(context: Context, shape: tuple[int, ...]) -> Tensor:
    heads = geometry(context.tiny)
    generator = torch.Generator(context.device).manual_seed(0)
    size = (*shape, heads.head_dim)
    return torch.randn(size, generator=generator, device=context.device, dtype=heads.dtype)


def _weight(context: Context) -> Tensor:
    heads = geometry(context.tiny)
    width = heads.heads * heads.head_dim
    generator = torch.Generator(context.device).manual_seed(1)
    w = torch.randn(width, width, generator=generator, device=context.device, dtype=heads.dtype)
    return w / width**0.5
