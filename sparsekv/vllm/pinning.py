"""Cuts layer by layer, in plain torch, as the CPU backend makes them; on a GPU `cutting` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sparsekv.vllm.compaction import BlockAccess, Scorer, apply, cuts
from sparsekv.vllm.layout import Layout
from sparsekv.vllm.rows import Step
from sparsekv.vllm.sums import apply_sums


def pin_best(
    step: Step, layout: Layout, table: Tensor, scorer: Scorer, access: BlockAccess,
    names: Sequence[str], layers: Mapping[str, Any],
) -> None:  # fmt: skip
    """Pin the best tokens of these requests, in every layer of the group `names`, in place.

    table: int32 [B, M], as vLLM has it. layers: vLLM's `static_forward_context`, by name.
    """
    for cut in cuts(step, layout, table, scorer.rows):
        for name in names:
            impl, cache = layers[name].impl, layers[name].kv_cache
            if not scorer.rows:
                apply_sums(cut, cache, impl.sums, access, layout)
                continue
            softcap = impl.logits_soft_cap or None
            apply(cut, cache, impl.ring, access, layout, scorer, impl.scale, softcap)
