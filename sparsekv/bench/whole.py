"""One generation after a long prompt, measured: its first token, its steps, its cache, its peak."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import sparsekv
from sparsekv.bench.llama import generate, token_ms
from sparsekv.hf.compat import output_cache

_MIB = 1 << 20
_OURS = "sparsekv"  # how our warnings begin


@dataclass(frozen=True)
class Whole:
    """Figures of one generation.

    ttft_ms: to the first token. token_ms: a token between each two later marks. kv_mib: K and V
    that exist at the end; kept: tokens a KV head, mean. peak_mib: the most that was allocated
    during the prompt beyond what was there before; None on a CPU. warnings: ours, such as the
    reason why steps were not captured.
    """

    ttft_ms: float
    token_ms: tuple[float, ...]
    kv_mib: float
    kept: float
    peak_mib: float | None
    warnings: tuple[str, ...]

    def figures(self) -> dict[str, float]:
        """What goes beside the value of a row."""
        found = {"kv_mib": self.kv_mib, "kept": self.kept, "warnings": float(len(self.warnings))}
        return found if self.peak_mib is None else found | {"peak_mib": self.peak_mib}


def measured(model: Any, ids: Tensor, marks: Sequence[int]) -> Whole:
    """Generate marks[-1] tokens after `ids`; marks[0] is 1. See `llama.generate`."""
    peaks: list[int] = []

    def note_peak(input_ids: Tensor, scores: Tensor) -> Tensor:
        peaks.append(torch.cuda.max_memory_allocated() if ids.is_cuda else 0)
        return scores

    if ids.is_cuda:
        gc.collect()  # what an earlier run left in cycles must not be freed on the way
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if ids.is_cuda else 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        times, output = generate(
            model, ids, marks, return_dict_in_generate=True, logits_processor=[note_peak]
        )
    kv_bytes, kept = _held(output_cache(output))
    said = (str(one.message) for one in caught)
    return Whole(
        times[0],
        token_ms(times, marks),
        kv_bytes / _MIB,
        kept,
        (peaks[0] - before) / _MIB if ids.is_cuda else None,  # the first is that of the prompt
        tuple(text for text in said if text.startswith(_OURS)),
    )


def _held(cache: Any) -> tuple[int, float]:
    """(bytes of K and V that exist, tokens a KV head)."""
    if isinstance(cache, sparsekv.SparseCache):
        report = cache.report()
        return report.kv_bytes, report.kept.mean
    layers = cache.layers
    total = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    return total, sum(layer.keys.shape[-2] for layer in layers) / len(layers)
