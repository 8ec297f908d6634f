"""`generate` of the whole model: time to the first token, time a token.

Everything goes through what a user calls: `sparsekv.patch`, `generate`, `report`. A further way of
running our model is one line in `VARIANTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparsekv.bench.case import Case, Context, Factory, Round, Shape, Target, target
from sparsekv.bench.llama import (
    generate,
    patched,
    prompt,
    step_bytes,
    token_ms,
    twin,
)
from sparsekv.bench.model_peers import figure, kvpress_figures, vllm_figures

# name of the contender -> further arguments of sparsekv.patch
VARIANTS: dict[str, dict[str, Any]] = {"ours": {"compile": True}, "ours_uncompiled": {}}
# A batch is compiled for its steps only: its prompt takes seconds, compiling it a minute and more.
BATCH_VARIANTS: dict[str, dict[str, Any]] = {
    "ours": {"compile": "decode"}, "ours_uncompiled": {},
}  # fmt: skip
# Compiling takes longer than all the tiny cases.
TINY_VARIANTS: dict[str, dict[str, Any]] = {"ours": {}}

_MARKS = (33, 65, 97, 129, 161)  # the steps before the first are for compiling and capturing
_TINY_MARKS = (3, 5, 7)
_TINY_BUDGET = 24


def generate_cases(tiny: bool) -> list[Case]:
    """In order of importance."""
    short, long = (48, 96) if tiny else (4000, 32000)
    batches = (2, 3) if tiny else (20, 64)
    budget = _TINY_BUDGET if tiny else 512
    one = target("≤ 5.6 ms, stretch 5.0", "value <= 5.6", stretch="value <= 5.0")
    return [
        _token(tiny, 1, short, "full", short, one, static=True),
        _ttft(tiny, short, target("≤ 1.0× HF dense SDPA", "ratio.hf_dynamic >= 1.0")),
        _ttft(tiny, long, target("≤ 0.8× HF dense SDPA", "ratio.hf_dynamic >= 1.25")),
        _token(tiny, batches[0], short, "snapkv", budget, target("≤ 6.2 ms", "value <= 6.2")),
        _token(tiny, batches[1], short, "snapkv", budget, target("≤ 7.0 ms", "value <= 7.0"), 1),
        _token(tiny, 1, short, "snapkv", budget, None),
        _token(tiny, 1, short, "snapkv", budget, None, sampled=True),
    ]


def _marks(context: Context) -> tuple[int, ...]:
    return _TINY_MARKS if context.tiny else _MARKS


def _token(
    tiny: bool,
    rows: int,
    tokens: int,
    policy: str,
    budget: int,
    wanted: Target | None,
    rounds: int = 2,
    static: bool = False,
    sampled: bool = False,
) -> Case:
    """Time a token; static: also beside transformers' compiled static cache."""
    sampling = {"do_sample": True, "temperature": 0.8, "top_p": 0.95} if sampled else {}
    variants = TINY_VARIANTS if tiny else VARIANTS if rows == 1 else BATCH_VARIANTS
    ours = {
        name: _ours_token(variant, policy, budget, sampling) for name, variant in variants.items()
    }
    peers = {name: factory for name, factory in ours.items() if name != "ours"}
    peers["hf_dynamic"] = _hf_token(**sampling)
    if static:
        peers["hf_static_compile"] = _hf_static_token
    if not sampled:
        peers["vllm"] = figure(vllm_figures, f"{rows} {tokens}")
    shape: Shape = {"policy": policy, "B": rows, "S": tokens, "budget": budget}
    if sampled:
        shape["sampling"] = "top-p"
    return Case(
        "time a token",
        "generate",
        shape,
        lambda context: prompt(context, rows, tokens),
        ours["ours"],
        peers,
        measure="samples",
        bytes=step_bytes(tiny, 4 if tiny else 2, rows, budget),
        roof="copy",
        target=wanted,
        rounds=rounds,
    )


def _ours_token(
    variant: dict[str, Any], policy: str, budget: int | float, sampling: dict[str, Any]
) -> Factory:
    def factory(ids: torch.Tensor, context: Context) -> Callable[[], Round]:
        model = patched(context, variant, policy, budget)
        return lambda: _round(model, ids, _marks(context), sampling)

    return factory


def _hf_token(**kwargs: Any) -> Factory:
    def factory(ids: torch.Tensor, context: Context) -> Callable[[], Round]:
        model = twin(context, "hf_dynamic")
        return lambda: _round(model, ids, _marks(context), kwargs)

    return factory


def _hf_static_token(ids: torch.Tensor, context: Context) -> Callable[[], Round]:
    context.need_gpu("transformers' compiled decoding")
    model = twin(context, "hf_static_compile")
    return lambda: _round(model, ids, _marks(context), {"cache_implementation": "static"})


def _round(model: Any, ids: torch.Tensor, marks: tuple[int, ...], settings: Any) -> Round:
    times, _ = generate(model, ids, marks, **settings)
    return Round(token_ms(times, marks))


# ---------------------------------------------------------------------- first token


def _ttft(tiny: bool, tokens: int, wanted: Target) -> Case:
    variants = TINY_VARIANTS if tiny else VARIANTS
    ours = {name: _ours_first(variant) for name, variant in variants.items()}
    peers = {name: factory for name, factory in ours.items() if name != "ours"}
    peers["hf_dynamic"] = _hf_first
    peers["kvpress"] = figure(kvpress_figures, f"ttft {tokens}")
    if tokens == 4000 or tiny:
        peers["vllm"] = figure(vllm_figures, f"ttft {tokens}")
    return Case(
        "time to first token",
        "generate",
        {"policy": "snapkv", "B": 1, "S": tokens, "budget": 0.1},
        lambda context: prompt(context, 1, tokens),
        ours["ours"],
        peers,
        measure="samples",
        target=wanted,
    )


def _ours_first(variant: dict[str, Any]) -> Factory:
    def factory(ids: torch.Tensor, context: Context) -> Callable[[], float]:
        return _first(patched(context, variant, "snapkv", 0.1), ids)

    return factory


def _hf_first(ids: torch.Tensor, context: Context) -> Callable[[], float]:
    return _first(twin(context, "hf_dynamic"), ids)


def _first(model: Any, ids: torch.Tensor) -> Callable[[], float]:
    generate(model, ids, (1,))  # compile
    return lambda: generate(model, ids, (1,))[0][0]
