"""What the files of this package hand to one another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Head = dict[int, float]  # kept position -> score
Ranking = list[Head]  # one a KV head; higher stays


@dataclass
class Plan:
    """Slots of a layer, tokens at both ends that never go, and what a decode step does.

    budget: slots that a decode step may hold; None: everything. prefill: what a prompt leaves, if
    that is not the budget. low: decode="interval" compresses to it once more than `budget` are
    held. heads: one plan a KV head where they differ. select: tokens that a step attends (quest).
    """

    budget: int | None
    sinks: int = 0
    recent: int = 0
    decode: str = "grow"
    prefill: int | None = None
    low: int | None = None
    heads: list[Plan] | None = None
    select: int | None = None

    def of(self, head: int) -> Plan:
        """The plan of one KV head."""
        return self if self.heads is None else self.heads[head]

    def left(self) -> int | None:
        """Slots after a prompt."""
        return self.budget if self.prefill is None else self.prefill


@dataclass
class View:
    """One layer of one row, when something may have to go.

    heads: kept position -> accumulated score, one dict a KV head. q [HQ, R, D] the queries of this
    forward at positions `at`; window: the observation queries and their positions; k, v [HK, N, D]
    of all tokens ever; unrotated: queries before RoPE, parts [HQ, M, D]; theta: the base of RoPE;
    steps: decode steps since the last prompt.
    """

    policy: Any
    layer: int
    plan: Plan
    heads: list[Head]
    q: Tensor
    at: list[int]
    window: tuple[Tensor, list[int]]
    k: Tensor
    v: Tensor
    scale: float
    theta: float
    rows: Callable[[Tensor, list[int]], Tensor]  # queries, positions -> probabilities [HQ, R, N]
    o_proj: Tensor | None = None
    unrotated: list[Tensor] = field(default_factory=list)
    steps: int = 0

    @property
    def kv_heads(self) -> int:
        return len(self.heads)

    @property
    def seen(self) -> int:
        """Tokens so far, those of this forward included."""
        return self.k.shape[1]

    def kept(self, head: int) -> list[int]:
        """Kept positions of a KV head, ascending."""
        return sorted(self.heads[head])

    def older(self, head: int) -> list[int]:
        """Kept positions before the protected recent ones, sinks included."""
        kept = self.kept(head)
        return kept[: max(len(kept) - self.plan.of(head).recent, 0)]

    def free(self, head: int) -> list[int]:
        """Kept positions that nothing protects."""
        return [j for j in self.older(head) if j >= self.plan.of(head).sinks]

    def safe(self, head: int) -> set[int]:
        """Kept positions that never go."""
        return set(self.kept(head)) - set(self.free(head))
