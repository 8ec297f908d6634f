"""Time a token against the length of the prompt, dense and at a budget; one generation each.

Every generation captures its step; the tokens before the second mark hold that, and do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparsekv.bench.case import Case, Context, Factory, Round
from sparsekv.bench.generate_cases import TINY_VARIANTS, VARIANTS
from sparsekv.bench.llama import generate, patched, prompt, twin
from sparsekv.bench.whole import measured

BY_CONTEXT = "time a token by context"
_CONTEXTS, _TINY_CONTEXTS = (4000, 8000, 16000, 32000), (48, 96)
_BUDGET, _TINY_BUDGET = 2048, 24
_MARKS, _TINY_MARKS = (1, 17, 49, 81), (1, 3, 5, 7)


def context_cases(tiny: bool) -> list[Case]:
    """Ours without eviction, beside snapkv at a budget and transformers' cache."""
    return [_case(tiny, tokens) for tokens in (_TINY_CONTEXTS if tiny else _CONTEXTS)]


def _case(tiny: bool, tokens: int) -> Case:
    budget = _TINY_BUDGET if tiny else _BUDGET
    return Case(
        BY_CONTEXT,
        "generate",
        {"B": 1, "S": tokens},
        lambda context: prompt(context, 1, tokens),
        _ours("full", budget),
        {f"ours_snapkv_{budget}": _ours("snapkv", budget), "hf_dynamic": _dense},
        measure="samples",
        rounds=1,
    )


def _ours(policy: str, budget: int) -> Factory:
    def factory(ids: torch.Tensor, context: Context) -> Callable[[], Round]:
        variant = (TINY_VARIANTS if context.tiny else VARIANTS)["ours"]
        # Patched anew for every run: contenders of a case share the model.
        return _run(lambda: patched(context, variant, policy, budget), ids, context)

    return factory


def _dense(ids: torch.Tensor, context: Context) -> Callable[[], Round]:
    return _run(lambda: twin(context, "hf_dynamic"), ids, context)


def _run(model_of: Callable[[], Any], ids: torch.Tensor, context: Context) -> Callable[[], Round]:
    """Time a token; beside it time to the first, the cache and the peak."""
    marks = _TINY_MARKS if context.tiny else _MARKS

    def run() -> Round:
        model = model_of()
        generate(model, ids, (3,))  # compile
        found = measured(model, ids, marks)
        return Round(found.token_ms[1:], {"ttft_ms": found.ttft_ms, **found.figures()})

    return run
