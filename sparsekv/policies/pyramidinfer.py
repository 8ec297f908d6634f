"""PyramidInfer: deeper layers see fewer tokens of the prompt (arXiv 2405.12532).

The only policy here that saves work in prompts: hidden states are dropped between layers. The tail,
the last 1 + R tokens with R = int(recent T), goes through all L layers; the c tokens before it are
the context. After layer l, with A the attention of the tail's rows, mean over all query heads:

    s_j   = sum_{i in tail} w_i A_ij,    w = linspace(1, distance_weight, 1 + R)             [B, c]
    r_l   = (1 - decay) (cos(pi l / L) + 1) / 2 + decay
    k     = int(c r_l)  if l mod interval == 0, c > least and that is > least,  else c
    least = min(min_context, T - 1 - R)

the k best context tokens (the first `sinks` always) and the tail go on to layer l + 1, for good.
Each layer caches the tokens that it has seen. r_0 = 1, so two layers see all of them.

While decoding, each layer cuts windows of E = `exceed` generated tokens, each once: when R + E
tokens have come since the last cut, max(int(E gen_keep g_l), 1) of the E before the newest 1 + R
stay, g as r with gen_decay, scored as above by the rows of the newest 1 + R. (The first window
starts with the last prompt token.) These sums are kept per slot as the rows come.

decay=None: the largest of 0, 1/4096 .. 1 by which the layers see `budget` tokens or fewer on
average. With a decay the budget does not matter, unless it holds the whole prompt: then nothing is
dropped. plan() raises ValueError where no decay is small enough: the tail alone is `recent` of the
prompt, and two layers see all of it.

Defaults are the released 7B/8B configuration but for the decay, see `published`. R is that of the
prompt; the official code lets it grow with the text. Not reproduced: row weights that compound over
cuts, stale rows of layers that are skipped, masks misaligned by left padding.

Refused: padding, prompts in several forwards (a second turn is one: the tail is a share of the
whole prompt), beams, assisted decoding, tensor parallelism, compile=True, sliding layers. Logits
of prompt tokens that were dropped on the way are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sparsekv.policies._facts import Facts
from sparsekv.policies.base import (
    LayerPlan,
    ModelShape,
    Need,
    Phase,
    Policy,
    Stats,
    number,
    positive,
)

_STEPS = 4096  # decays that are tried


@dataclass(frozen=True)
class PyramidInfer(Policy):
    """Prompts lose hidden states from layer to layer; fractions are of the prompt or in (0, 1]."""

    recent: float = 0.2
    decay: float | None = None  # type: ignore[assignment]  # no decay of scores, see observe()
    interval: int = 1
    sinks: int = 4
    distance_weight: float = 1.2
    min_context: int = 64
    gen_decay: float = 0.1
    gen_keep: float = 0.9
    exceed: int = 16

    name: ClassVar[str] = "pyramidinfer"
    keeps: ClassVar[str] = "ever fewer prompt tokens from layer to layer, and the newest of all"
    paper: ClassVar[str] = "PyramidInfer, arXiv 2405.12532"
    facts: ClassVar[Facts] = Facts(
        protects="the tail of the prompt and its first `sinks` tokens; generated tokens until "
        "R + E newer ones have come",
        budget="C tokens that a layer sees on average over the layers, fewer the deeper",
        acts="between the layers of a prompt; then once every `exceed` generated tokens",
        flops="prompt: 2 (1 + R) n D HQ over the n tokens that the layer sees; attention and all "
        "linear layers run on n tokens instead of T",
        bytes="prompt: K once more, hidden states moved; step: 4 n HQ of probabilities, 8 n HK of "
        "sums",
    )
    stateful: ClassVar[bool] = True
    prunes: ClassVar[bool] = True
    tensor_parallel: ClassVar[Literal["local", "refused"]] = "refused"
    refuses: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "beams": "beams come and go, but a window of generated tokens is cut for good",
            "assisted": "a window of generated tokens that was cut cannot be taken back",
        }
    )

    def __post_init__(self) -> None:
        for name in ("interval", "exceed"):
            positive(name, getattr(self, name))
        for name in ("sinks", "min_context"):
            positive(name, getattr(self, name), at_least=0)
        decay = 0.0 if self.decay is None else self.decay
        shares = {"recent": self.recent, "decay": decay, "gen_decay": self.gen_decay}
        for name, value in (shares | {"gen_keep": self.gen_keep}).items():
            number(name, value, at_most=1)
        number("distance_weight", self.distance_weight)
        if not self.distance_weight > 0.0:
            raise ValueError(f"expected distance_weight > 0, got {self.distance_weight!r}")

    @classmethod
    def published(cls, size: Literal["7B", "13B", "70B"] = "7B") -> PyramidInfer:
        """The released configuration for a model of that size; "7B" is also that of 8B."""
        if size not in ("7B", "13B", "70B"):
            raise ValueError(f"expected size to be 7B, 13B or 70B, got {size!r}")
        decay, interval = {"7B": (0.9, 1), "13B": (0.8, 2), "70B": (0.9, 3)}[size]
        return cls(decay=decay, interval=interval)

    def tail(self, tokens: int) -> int:
        """1 + R of a prompt of `tokens`, at most all of it."""
        return min(1 + int(self.recent * tokens), tokens)

    def layer_tokens(self, layers: int, tokens: int, budget: int) -> tuple[int, ...]:
        """Prompt tokens that each layer sees.

        Raises:
            ValueError: more tokens a layer than the budget on average, whatever the decay.
        """
        if tokens <= budget:
            return (tokens,) * layers
        tail = self.tail(tokens)
        context, least = tokens - tail, min(self.min_context, tokens - tail)
        decay = self.decay
        if decay is None:
            total = layers * (budget - tail)
            decay, smallest = _solved(layers, context, least, self.interval, total)
            if decay is None:
                needed = tail - (-smallest // layers)
                raise ValueError(
                    f"expected a budget of at least {needed} tokens a layer for a prompt of "
                    f"{tokens}, got {budget}; a smaller recent or min_context needs less"
                )
        counts = _contexts(layers, context, least, self.interval, torch.tensor([decay]).double())
        return tuple(tail + int(n) for n in counts)

    def generated(self, layer: int, layers: int) -> int:
        """How many of a window of `exceed` generated tokens a layer keeps."""
        share = self.gen_keep * _ratio(layer, layers, self.gen_decay)
        return max(int(self.exceed * share), 1)

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        counts = self.layer_tokens(shape.num_layers, tokens, budget)
        return tuple(LayerPlan(None, prefill=count) for count in counts)

    def needs(self, layer: int, phase: Phase) -> Need | None:
        # Of a prompt the rows of its tail, by `weights`: a share of the prompt, no number of rows.
        return None if phase == "prefill" else Need("sum", group="layer_mean")

    def weights(self, rows: int) -> Tensor:
        """w of the last `rows` rows, oldest first, fp32 [rows]."""
        return torch.linspace(1.0, self.distance_weight, rows)

    def observe(
        self, layer: int, phase: Phase, state: Tensor, columns: Tensor, positions: Tensor
    ) -> Tensor:
        return state + columns  # rows that judge a slot; the runtime weighs them

    def score(self, layer: int, stats: Stats) -> Tensor:
        assert stats.columns is not None, "pyramidinfer ranks by the columns of the tail"
        return stats.columns


def _ratio(layer: int, layers: int, decay: float) -> float:
    return (1 - decay) * (math.cos(math.pi * layer / layers) + 1) / 2 + decay


def _contexts(layers: int, context: int, least: int, interval: int, decay: Tensor) -> Tensor:
    """Context tokens that each layer sees by each decay float64 [N]: float64 [L, N]."""
    seen = [torch.full_like(decay, context)]
    for layer in range(layers - 1):
        before = seen[-1]
        ratio = (1 - decay) * (math.cos(math.pi * layer / layers) + 1) / 2 + decay
        kept = (before * ratio).floor()
        prunes = (before > least) & (ratio < 1) & (kept > least) & (layer % interval == 0)
        seen.append(torch.where(prunes, kept, before))
    return torch.stack(seen)


@lru_cache(maxsize=64)
def _solved(
    layers: int, context: int, least: int, interval: int, total: int
) -> tuple[float | None, int]:
    """The largest decay by which the layers see at most `total` context tokens together, or None;
    and the fewest that they see by any."""
    decays = torch.arange(_STEPS + 1, dtype=torch.float64) / _STEPS
    sums = _contexts(layers, context, least, interval, decays).sum(0)
    fits = sums <= total
    return (float(decays[fits].max()) if fits.any() else None), int(sums.min())
