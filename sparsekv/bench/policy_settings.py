"""How each policy is run where none was asked for: its defaults, and what stands in for the rest.

What a policy needs of the outside (gates, a tokenizer, a plan) is replaced by something that makes
the same work and means nothing: good for times and bytes, not for what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from sparsekv.policies import POLICIES, Duo, KVzip, ModelShape, Planned, Policy

_OUTSIDE = ("gates", "tokenizer", "shares", "head_dim")


class WordTokenizer:
    """One id a word, by its length; no chat template. For the requests of kvzip's passes."""

    chat_template: str | None = None

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        """The ids of a text, from 2 on."""
        return {"input_ids": [2 + len(word) for word in text.split()]}


@dataclass(frozen=True)
class Setting:
    """A policy, the budget it runs at, and both in words."""

    policy: Policy
    budget: int
    about: str


def setting(name: str, shape: ModelShape, tokens: int, budget: int) -> Setting:
    """Policy `name` for prompts of `tokens`, at `budget` or the smallest above that it allows.

    A policy that allows none gets `budget`, and says why it cannot run when it is run.
    """
    make, stand_in = _MADE.get(name, (lambda shape: POLICIES[name](), ""))
    policy = make(shape)
    least = _least(policy, shape, tokens, budget)
    words = [f"budget {least}" + (", the smallest that it allows" if least > budget else "")]
    words += [stand_in] if stand_in else []
    told = (f.name for f in fields(policy) if f.name not in _OUTSIDE)
    words += [f"{name} {_value(getattr(policy, name))}" for name in told]
    return Setting(policy, least, ", ".join(words))


def compression_interval(policy: Policy, shape: ModelShape, tokens: int, budget: int) -> int | None:
    """Steps between two compressions of a policy that compresses between steps, or None."""
    plan = policy.plan(shape, tokens, budget)[0]
    if plan.decode != "interval" or plan.budget is None or plan.low is None:
        return None
    return plan.budget - plan.low + 1


def alternating_gates(shape: ModelShape) -> tuple[tuple[float, ...], ...]:
    """Every other head of a layer a retrieval head, the others in the next layer."""
    heads = range(shape.num_kv_heads)
    return tuple(tuple(float((i + h) % 2) for h in heads) for i in range(shape.num_layers))


def falling_shares(shape: ModelShape) -> tuple[tuple[int, ...], ...]:
    """L for the first layer, 1 for the last, times 1 .. HK for the heads."""
    heads = range(1, shape.num_kv_heads + 1)
    return tuple(tuple((shape.num_layers - i) * h for h in heads) for i in range(shape.num_layers))


def _least(policy: Policy, shape: ModelShape, tokens: int, budget: int) -> int:
    """The smallest budget from `budget` to `tokens` that plan() takes, by bisection."""

    def fits(count: int) -> bool:
        try:
            policy.plan(shape, tokens, count)
        except ValueError:
            return False
        return True

    if fits(budget) or not fits(tokens):
        return budget
    low, high = budget, tokens
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _value(value: object) -> str:
    return value.name if isinstance(value, Policy) else str(value)


# name -> (how it is made, what stands in for what it needs)
_MADE: Mapping[str, tuple[Callable[[ModelShape], Policy], str]] = MappingProxyType(
    {
        "duo": (lambda shape: Duo(alternating_gates(shape)), "alternating gates"),
        "planned": (
            lambda shape: Planned(shares=falling_shares(shape)),
            "shares that fall over depth",
        ),
        "kvzip": (
            lambda shape: KVzip(WordTokenizer()),
            "stub tokenizer, passes counted in the prefill",
        ),
    }
)
