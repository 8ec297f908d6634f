"""StreamingLLM: the first tokens (attention sinks) and the newest ones (arXiv 2309.17453).

    kept = {0 .. s-1} + {t-(C-s)+1 .. t}        score_j = position_j, [B, HK, S]

No attention statistic is needed. s = 4 is the paper's choice (perplexity is flat from 4 on). While
decoding, the new token overwrites the oldest one that is not a sink, so C slots are never exceeded.

positions="original" keeps every key at its true position: right within the trained context length.
positions="cache" is the paper: positions are re-indexed by cache slot, the only way to run past the
trained length. The keys are cached after RoPE, and attention depends on distances only, so the
runtime moves just the sinks (`rerotates_sinks`). The official code caches keys before RoPE and
rotates all of them at each step; the logits are the same.

The official code evicts before the forward pass (prefill included); here the prompt is attended in
full and cut afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from sparsekv.policies._facts import Facts
from sparsekv.policies.base import LayerPlan, ModelShape, Policy, Stats, one_of, positive


@dataclass(frozen=True)
class Streaming(Policy):
    """`sinks` first tokens and the newest budget - sinks; positions: "original" or "cache"."""

    sinks: int = 4
    positions: Literal["original", "cache"] = "original"

    name: ClassVar[str] = "streaming"
    keeps: ClassVar[str] = "attention sinks and the newest tokens"
    paper: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"
    facts: ClassVar[Facts] = Facts(
        protects="the first `sinks` tokens and the newest C - sinks",
        budget="C a KV head, the same everywhere",
        acts="after the prompt; then each new token overwrites the oldest that is not a sink",
        flops="none; positions='cache' turns the sinks on: 6 sinks D HK a step",
        bytes="prompt: none; step: 4 n HK, the positions",
    )
    evicts_by: ClassVar[Literal["score", "position"]] = "position"

    def __post_init__(self) -> None:
        positive("sinks", self.sinks, at_least=0)
        one_of("positions", self.positions, ("original", "cache"))

    @property
    def rerotates_sinks(self) -> bool:  # type: ignore[override]  # constant in other policies
        """Whether the runtime must shift the sink keys so that positions follow cache slots."""
        return self.positions == "cache"

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        # A budget of at most `sinks` gives up sinks, not the current token: it needs a slot.
        sinks = min(self.sinks, budget - 1)
        layer = LayerPlan(budget, sinks=sinks, recent=budget - sinks, decode="replace")
        return (layer,) * shape.num_layers

    def score(self, layer: int, stats: Stats) -> Tensor:
        return stats.positions.float()  # exact up to 2**24 tokens
