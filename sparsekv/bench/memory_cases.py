"""Memory: what a cache takes after a prompt, the peak on the way, the longest prompt that fits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sparsekv
from sparsekv.bench.case import Case, Context, Factory, Missing, Round, Shape, target
from sparsekv.bench.llama import generate, kv_shape, llama, patched, prompt, twin, weight_bytes
from sparsekv.hf.compat import output_cache

BY_LENGTH = "KV of one prompt"
_MIB, _GIB = 1 << 20, 1 << 30
_BUDGET, _TINY_BUDGET = 1024, 24
_LIMIT_GIB = 24
_CHUNK = 4096
_BATCH_CHUNK = 512  # columns: the activations of 8 rows stay below a twentieth of the weights
# Prompt lengths that are tried: 15 % apart, multiples of 64, up to 172 000 tokens.
_LENGTHS = tuple(round(16000 * 1.15**i / 64) * 64 for i in range(18))
# name of the contender -> (further arguments of sparsekv.patch, arguments of generate)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ours": ({}, {}),
    "ours_chunked": ({}, {"prefill_chunk_size": _CHUNK}),
}


def memory_cases(tiny: bool) -> list[Case]:
    """The cache of a batch, then of single prompts by length."""
    batch, lengths = ((2, 96), (48, 96)) if tiny else ((8, 32000), (4000, 16000, 32000))
    return [
        _after_prefill(tiny, *batch),
        *(_by_length(tiny, t) for t in lengths),
    ]


def longest_cases(tiny: bool) -> list[Case]:
    """The longest prompt; long runs, so it comes last."""
    return [_longest(tiny)]


def _in_chunks(columns: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Ours in chunks, which is what long prompts are best run as, and in one go: then the
    activations of all tokens are there at once."""
    return {"ours": ({}, {"prefill_chunk_size": columns}), "ours_one_shot": ({}, {})}


def _contenders(
    make: Callable[[Callable[[Context], Any], dict], Factory],
    variants: dict[str, tuple[dict[str, Any], dict[str, Any]]],
) -> dict[str, Factory]:
    """Ours in all variants, then transformers' dense cache in one go and in chunks."""

    def model_of(extra: dict[str, Any]) -> Callable[[Context], Any]:
        def model(context: Context) -> Any:
            return patched(context, extra, "snapkv", _TINY_BUDGET if context.tiny else _BUDGET)

        return model

    ours = {name: make(model_of(extra), how) for name, (extra, how) in variants.items()}
    return ours | {
        "hf_dynamic": make(lambda context: twin(context, "hf_dynamic"), {}),
        "hf_dynamic_chunked": make(
            lambda context: twin(context, "hf_dynamic"), {"prefill_chunk_size": _CHUNK}
        ),
    }


def _case(
    what: str,
    shape: Shape,
    inputs: Any,
    make: Any,
    variants: dict[str, Any] = VARIANTS,
    without: tuple[str, ...] = (),
    **kwargs: Any,
) -> Case:
    contenders = _contenders(make, variants)
    ours = contenders.pop("ours")
    for name in without:
        contenders.pop(name)
    return Case(
        what, "memory", shape, inputs, ours, contenders, measure="samples", rounds=1, **kwargs
    )


# ---------------------------------------------------------------------- cache and peak


def _after_prefill(tiny: bool, rows: int, tokens: int) -> Case:
    return _case(
        "KV after prefill",
        {"B": rows, "S": tokens, "budget": _TINY_BUDGET if tiny else _BUDGET},
        lambda context: prompt(context, rows, tokens),
        _kv_after_prefill,
        _in_chunks(_BATCH_CHUNK),
        without=("hf_dynamic_chunked",),  # long, and the lengths below have it
        unit="MiB",
        target=target(
            "≤ 1.05× the kept bytes; peak ≤ (weights + kept + one layer's fresh K/V) + 5 %",
            "exist_over_kept <= 1.05",
            "peak_over_bound <= 1",
        ),
    )


def _by_length(tiny: bool, tokens: int) -> Case:
    return _case(
        BY_LENGTH,
        {"B": 1, "S": tokens, "budget": _TINY_BUDGET if tiny else _BUDGET},
        lambda context: prompt(context, 1, tokens),
        _kv_after_prefill,
        unit="MiB",
    )


def _kv_after_prefill(model_of: Callable[[Context], Any], how: dict[str, Any]) -> Factory:
    """MiB of K and V that exist after the prompt; beside them what was kept, and the peak."""

    def factory(ids: Tensor, context: Context) -> Callable[[], Round]:
        model = model_of(context)

        def run() -> Round:
            if context.on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if context.on_gpu else 0
            _, output = generate(model, ids, (1,), return_dict_in_generate=True, **how)
            exist, kept = _bytes(output_cache(output))
            extra = {"kept_mib": kept / _MIB, "exist_over_kept": exist / kept}
            if context.on_gpu:
                extra |= _peak(context, ids, kept, torch.cuda.max_memory_allocated() - before)
            return Round((exist / _MIB,), extra)

        return run

    return factory


def _bytes(cache: Any) -> tuple[int, float]:
    """(bytes of K and V that exist, bytes of the slots that are kept)."""
    if isinstance(cache, sparsekv.SparseCache):
        report = cache.report()
        # dense_bytes counts every token in every layer; a slot that is kept costs the same.
        seen = len(report.layers) * max(report.tokens_seen)
        return report.kv_bytes, report.dense_bytes * sum(x.mean for x in report.layers) / seen
    total = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return total, float(total)


def _peak(context: Context, ids: Tensor, kept: float, peak: int) -> dict[str, float]:
    """The peak over the weights, and over what the target allows."""
    model = llama(context)
    fresh = 2 * kv_shape(context.tiny)[1] * ids.numel() * model.dtype.itemsize
    weights = weight_bytes(model)
    return {
        "peak_mib": peak / _MIB,
        "fresh_layer_mib": fresh / _MIB,
        "peak_over_bound": (weights + peak) / (1.05 * (weights + kept + fresh)),
    }


# ---------------------------------------------------------------------- longest prompt


def _longest(tiny: bool) -> Case:
    return _case(
        "longest prompt in 24 GiB, bf16 weights",
        {"B": 1, "budget": _TINY_BUDGET if tiny else _BUDGET},
        lambda context: None,
        _longest_prompt,
        _in_chunks(_CHUNK),
        unit="tokens",
        better="high",
        target=target("≥ 4× HF dense", "ratio.hf_dynamic >= 4"),
    )


def _longest_prompt(model_of: Callable[[Context], Any], how: dict[str, Any]) -> Factory:
    """The longest prompt of `_LENGTHS` that `generate` gets through, two tokens made."""

    def factory(inputs: None, context: Context) -> Callable[[], float]:
        context.need_gpu("a limit on the device's memory")
        model = model_of(context)

        def run() -> float:
            _limit(weight_bytes(model))
            try:
                return longest(_LENGTHS, lambda tokens: _fits(model, context, tokens, how))
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)

        return run

    return factory


def _limit(weights: int) -> None:
    """Let this process take 24 GiB, and what it holds beside the weights on top."""
    torch.cuda.empty_cache()
    other = torch.cuda.memory_reserved() - weights
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    wanted = _LIMIT_GIB * _GIB + max(0, other)
    if wanted > total:
        raise Missing(f"needs {wanted / _GIB:.0f} GiB on the device, got {total / _GIB:.0f}")
    torch.cuda.set_per_process_memory_fraction(wanted / total)


def _fits(model: Any, context: Context, tokens: int, how: dict[str, Any]) -> bool:
    try:
        generate(model, prompt(context, 1, tokens), (2,), **how)
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        gc.collect()  # a failed forward may leave cycles that hold its tensors
        torch.cuda.empty_cache()
    return True


def longest(lengths: tuple[int, ...], fits: Callable[[int], bool]) -> int:
    """The largest of ascending `lengths` that fits, by bisection; 0 if the first does not."""
    low, high = -1, len(lengths)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(lengths[middle]):
            low = middle
        else:
            high = middle
    return lengths[low] if low >= 0 else 0
