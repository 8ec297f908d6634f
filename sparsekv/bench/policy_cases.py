"""`generate` on long prompts, once each: every policy, and time a token against context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import sparsekv
from sparsekv.bench.case import Case, Context, Factory, Round, Shape
from sparsekv.bench.generate_cases import TINY_VARIANTS, VARIANTS
from sparsekv.bench.llama import generate, patched, prompt, token_ms, twin
from sparsekv.hf.compat import output_cache

BY_CONTEXT = "time a token by context"
_CONTEXTS, _TINY_CONTEXTS = (4000, 8000, 16000, 32000), (48, 96)
_BUDGET, _TINY_BUDGET = 2048, 24
# Its tail alone is a fifth of the prompt, whatever the budget.
_OWN_BUDGET = "pyramidinfer"
_MARKS, _TINY_MARKS = (1, 17, 49), (1, 3, 5)


def policy_cases(tiny: bool) -> list[Case]:
    """Contexts, then the policies on the longest of them."""
    contexts = _TINY_CONTEXTS if tiny else _CONTEXTS
    return [
        *(_context(tiny, tokens) for tokens in contexts),
        *(_policy(tiny, name, contexts[-1]) for name in sparsekv.POLICIES if _has_default(name)),
    ]


def _has_default(name: str) -> bool:
    """Whether a policy runs by its name and our budget, without gates, a tokenizer or the like."""
    try:
        sparsekv.POLICIES[name]().ready()
    except ValueError:
        return False
    return name != _OWN_BUDGET


def _budget(tiny: bool) -> int:
    return _TINY_BUDGET if tiny else _BUDGET


def _context(tiny: bool, tokens: int) -> Case:
    budget = _budget(tiny)
    sparse = {f"ours_snapkv_{budget}": _ours("snapkv", budget), "hf_dynamic": _dense}
    return _case(BY_CONTEXT, {"B": 1, "S": tokens}, _ours("full", budget), sparse)


def _policy(tiny: bool, name: str, tokens: int) -> Case:
    budget = _budget(tiny)
    shape: Shape = {"policy": name, "B": 1, "S": tokens, "budget": budget}
    return _case("time a token by policy", shape, _ours(name, budget), {"hf_dynamic": _dense})


def _case(what: str, shape: Shape, ours: Factory, peers: dict[str, Factory]) -> Case:
    return Case(
        what, "generate", shape, lambda context: prompt(context, 1, int(shape["S"])), ours, peers,
        measure="samples", rounds=1,
    )  # fmt: skip


def _ours(policy: str, budget: int) -> Factory:
    def factory(ids: torch.Tensor, context: Context) -> Callable[[], Round]:
        variant = (TINY_VARIANTS if context.tiny else VARIANTS)["ours"]
        # Patched anew for every run: contenders of a case share the model.
        return _whole(lambda: patched(context, variant, policy, budget), ids, context)

    return factory


def _dense(ids: torch.Tensor, context: Context) -> Callable[[], Round]:
    run = _whole(lambda: twin(context, "hf_dynamic"), ids, context)
    # The same beside every policy, so it runs once a length.
    return lambda: context.once(f"dense {ids.shape[1]}", run)


def _whole(model_of: Callable[[], Any], ids: torch.Tensor, context: Context) -> Callable[[], Round]:
    """Time a token; beside it time to the first, the peak over the weights, the cache's report."""
    marks = _TINY_MARKS if context.tiny else _MARKS

    def run() -> Round:
        model = model_of()
        generate(model, ids, (3,))  # compile
        if context.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if context.on_gpu else 0
        times, output = generate(model, ids, marks, return_dict_in_generate=True)
        extra = {"ttft_ms": times[0]}
        if context.on_gpu:
            extra["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        cache = output_cache(output)
        if isinstance(cache, sparsekv.SparseCache):
            report = cache.report().to_dict()
            extra |= {key: report[key] for key in ("kv_bytes", "dense_bytes", "metadata_bytes")}
            extra["kept_mean"] = report["kept"]["mean"]
        return Round(token_ms(times, marks), extra)

    return run
