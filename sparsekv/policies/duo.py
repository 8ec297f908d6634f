"""DuoAttention: some heads keep everything, the others sinks and recent tokens (arXiv 2410.10819).

    retrieval(l, h)   <=>   gate_lh >= the `sparsity` quantile of all gates; one gate a KV head

A retrieval head keeps every token for ever. A streaming head keeps the first `sinks` and the newest
tokens, `sinks + recent` of them; the new token overwrites the oldest one that is not a sink. The
classes are found offline and are the same for every text: no statistic, no score.

`budget` is the most that a streaming head may hold; sinks get half of it at most. The quantile is
exact: it lies at rank sparsity (n - 1) of the n ascending gates, and of equal gates the first in
(layer, head) order is the better one. So sparsity 0 makes every head a retrieval head, 1 all but
one a streaming head. sparsity 0.5, sinks 64, recent 256 are the paper's for models with GQA (0.75
without); it finds 16 and 64 enough (`Duo.small_window`).

Gates come from the paper's training, from `sparsekv.calibrate_duo`, or by hand; `save` and
`Duo.load` keep them as JSON.

Not reproduced from the official code: noise on the gates that breaks ties at random; heads
reordered in the weights (pages of a head are its own here).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor

from sparsekv.policies._facts import Facts
from sparsekv.policies.base import HeadPlan, LayerPlan, ModelShape, Policy, Stats, number, positive
from sparsekv.policies.budgets import exact


@dataclass(frozen=True)
class Duo(Policy):
    """`gates` [layers][KV heads] in [0, 1]; the share `sparsity` of heads streams."""

    gates: tuple[tuple[float, ...], ...] | None = None
    sparsity: float = 0.5
    sinks: int = 64
    recent: int = 256

    name: ClassVar[str] = "duo"
    keeps: ClassVar[str] = "everything in retrieval heads, sinks and newest tokens in the others"
    paper: ClassVar[str] = "DuoAttention, arXiv 2410.10819"
    facts: ClassVar[Facts] = Facts(
        protects="all keys of retrieval heads; the first `sinks` of the others",
        budget="C at most a streaming head, which holds sinks + recent; none for retrieval heads",
        acts="after the prompt; then a new token overwrites the oldest of a streaming head that "
        "is not a sink",
        flops="none",
        bytes="prompt: none; step: 4 n HK, the positions",
    )
    evicts_by: ClassVar[Literal["score", "position"]] = "position"
    tensor_parallel: ClassVar[Literal["local", "refused"]] = "refused"

    @classmethod
    def small_window(cls, gates: tuple[tuple[float, ...], ...]) -> Duo:
        """16 sinks and 64 recent tokens, which the paper finds enough."""
        return cls(gates, sinks=16, recent=64)

    @classmethod
    def load(cls, path: str | Path, **settings: Any) -> Duo:
        """From a file that `save` wrote; `settings` replace those in it.

        A .tsv is what the paper's authors publish (full_attention_heads.tsv): a line a layer, a
        number a KV head.

        Raises:
            ValueError: a file that cannot be read or holds something else.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
            rows = [line.split("\t") for line in text.splitlines() if line.strip()]
            published = Path(path).suffix == ".tsv"
            data: dict[str, Any] = {"gates": rows} if published else json.loads(text)
            gates = tuple(tuple(float(gate) for gate in layer) for layer in data["gates"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"expected a JSON object with gates, or a .tsv of them, in {path}, got {error!r}"
            ) from error
        more = data.keys() - {f.name for f in fields(cls)}
        if more:
            raise ValueError(f"expected the fields of Duo alone in {path}, got {sorted(more)}")
        return cls(**(data | settings | {"gates": gates}))

    def save(self, path: str | Path) -> None:
        """Gates and settings as JSON."""
        self.ready()
        settings = {"sparsity": self.sparsity, "sinks": self.sinks, "recent": self.recent}
        Path(path).write_text(json.dumps({"gates": self.gates, **settings}, indent=1) + "\n")

    def __post_init__(self) -> None:
        positive("sinks", self.sinks, at_least=0)
        positive("recent", self.recent)
        number("sparsity", self.sparsity, at_most=1)
        if self.gates is None:
            return
        if len({len(layer) for layer in self.gates}) != 1 or not self.gates[0]:
            raise ValueError("expected gates as one row of equal length a layer, got others")
        for gate in (gate for layer in self.gates for gate in layer):
            number("every gate", gate, at_most=1)

    def ready(self) -> None:
        if self.gates is None:
            raise ValueError(
                "expected Duo(gates=...), one gate for each layer and KV head, got none: load them "
                "with Duo.load(path) or make them with sparsekv.calibrate_duo(model, ...)"
            )

    def retrieval_heads(self) -> tuple[tuple[bool, ...], ...]:
        """Which heads keep everything, by layer and KV head."""
        self.ready()
        assert self.gates is not None
        cells = [(-a, i, h) for i, layer in enumerate(self.gates) for h, a in enumerate(layer)]
        streaming = math.ceil(exact(self.sparsity) * (len(cells) - 1))
        chosen = {(i, h) for _, i, h in sorted(cells)[: len(cells) - streaming]}
        return tuple(
            tuple((i, h) in chosen for h in range(len(layer))) for i, layer in enumerate(self.gates)
        )

    def fits(self, shape: ModelShape) -> None:
        self.ready()
        assert self.gates is not None
        found = (len(self.gates), len(self.gates[0]))
        if found != (shape.num_layers, shape.num_kv_heads):
            raise ValueError(
                f"expected gates for {shape.num_layers} layers of {shape.num_kv_heads} KV heads, "
                f"got {found[0]} of {found[1]}"
            )

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        self.fits(shape)
        classes = self.retrieval_heads()
        held = min(self.sinks + self.recent, budget)
        sinks = min(self.sinks, budget // 2)
        window, everything = HeadPlan(held, sinks, held - sinks), HeadPlan(None)
        return tuple(
            LayerPlan(
                held, sinks, held - sinks, decode="replace",
                heads=tuple(everything if full else window for full in layer),
            )
            for layer in classes
        )  # fmt: skip

    def score(self, layer: int, stats: Stats) -> Tensor:
        return stats.positions.float()  # exact up to 2**24 tokens
