"""Every policy on one long prompt: prefill, time a token, what is cached, the peak.

One process, one set of weights, nothing compiled by torch. What a policy needs compiled by Triton
is compiled on the model's first layers, at the full length, so that a whole prompt runs once only;
but a policy that drops tokens between layers meets other lengths in the others, and runs twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

import sparsekv
from sparsekv.bench.case import Case, Context, Factory, Round, Shape, name_of
from sparsekv.bench.llama import generate, model_shape, patched, prompt, shallow_twin, twin
from sparsekv.bench.policy_settings import Setting, compression_interval, setting
from sparsekv.bench.policy_table import GROUP
from sparsekv.bench.whole import Whole, measured
from sparsekv.policies import ModelShape

_WHAT = "every policy"
_TOKENS, _TINY_TOKENS = 32000, 96
_BUDGET, _TINY_BUDGET = 1024, 24
# The first steps compile and capture; the time is that of the others.
_SETTLING, _STEPS = 4, 32
_TINY_MARKS = (1, 3, 5)
_LONGEST_INTERVAL = 150
_BASE = "full"


def policy_cases(tiny: bool) -> list[Case]:
    """All of `sparsekv.POLICIES`, in its order."""
    return [_case(tiny, name) for name in sorted(sparsekv.POLICIES, key=lambda n: n != _BASE)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Tiny shapes and the model's first layers are all that policies warn of, in every plan."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@_quiet()
def _chosen(tiny: bool, name: str, shape: ModelShape) -> Setting:
    tokens, budget = (_TINY_TOKENS, _TINY_BUDGET) if tiny else (_TOKENS, _BUDGET)
    return setting(name, shape, tokens, budget)


def _case(tiny: bool, name: str) -> Case:
    tokens, chosen = _TINY_TOKENS if tiny else _TOKENS, _chosen(tiny, name, model_shape(tiny))
    base: Shape = {"policy": _BASE, "B": 1, "S": tokens}
    return Case(
        _WHAT,
        GROUP,
        {"policy": name, "B": 1, "S": tokens},
        lambda context: prompt(context, 1, tokens),
        _ours(name),
        {"hf_dynamic": _dense},
        measure="samples",
        versus=None if name == _BASE else name_of(_WHAT, base),
        rounds=1,
        about=chosen.about,
    )


def _ours(name: str) -> Factory:
    def factory(ids: torch.Tensor, context: Context) -> Callable[[], Round]:
        return lambda: _round(name, ids, context)

    return factory


@_quiet()
def _round(name: str, ids: torch.Tensor, context: Context) -> Round:
    """Milliseconds to the first token; beside them the other figures."""
    first = shallow_twin(context)
    small = _chosen(context.tiny, name, model_shape(context.tiny, first))
    generate(sparsekv.patch(first, small.policy, small.budget), ids, (3,))  # compile
    shape = model_shape(context.tiny)
    chosen = _chosen(context.tiny, name, shape)
    if chosen.policy.prunes:
        generate(patched(context, {}, chosen.policy, chosen.budget), ids, (3,))  # compile
    interval = compression_interval(chosen.policy, shape, ids.shape[1], chosen.budget)
    marks = _TINY_MARKS if context.tiny else step_marks(interval)
    note = "" if interval is None or interval <= _LONGEST_INTERVAL else "no cut among the steps"
    return _as_round(measured(patched(context, {}, chosen.policy, chosen.budget), ids, marks), note)


def step_marks(interval: int | None) -> tuple[int, ...]:
    """When to look at the clock: after the first token, when all is compiled, at the end.

    interval: steps between two compressions. The time then holds one of them, not the first, for
    which kernels are compiled; unless that takes too many steps.
    """
    settling, steps = _SETTLING, _STEPS
    if interval is not None and interval <= _LONGEST_INTERVAL:
        settling, steps = interval + _SETTLING, interval
    return 1, 1 + settling, 1 + settling + steps


def _dense(ids: torch.Tensor, context: Context) -> Callable[[], Round]:
    def run() -> Round:
        model = twin(context, "hf_dynamic")
        generate(model, ids, (3,))
        return _as_round(measured(model, ids, _TINY_MARKS if context.tiny else step_marks(None)))

    # The same beside every policy, so it runs once.
    return lambda: context.once(f"dense {ids.shape[1]}", run)


def _as_round(found: Whole, note: str = "") -> Round:
    count = len(found.warnings)
    said = f"{count} warning{'s' if count > 1 else ''}: {found.warnings[0]}" if count else ""
    figures = {"token_ms": found.token_ms[-1], **found.figures()}
    return Round((found.ttft_ms,), figures, "; ".join(text for text in (note, said) if text))
