"""What docs/policies.md says of a policy that neither its attributes nor its docstring say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Stands in the class as `facts: ClassVar[Facts]`, one short text each.

    protects: the keys that stay whatever their score.
    budget: what has one, and what may differ from another's: heads, layers, rows.
    acts: when keys go.
    flops: per layer, on top of dense attention, which takes 2 T^2 D HQ of a prompt of T tokens
    (causal) and 4 n D HQ a step over n keys.
    bytes: per layer, read and written on top of attention.
    Letters as in `sparsekv/__init__.py`; C: the budget, T: tokens of the prompt, n: keys held.
    """

    protects: str
    budget: str
    acts: str
    flops: str
    bytes: str
