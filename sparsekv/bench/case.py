"""What a benchmark is made of: a case, its contenders, what it is judged by.

Nothing here measures. A contender is made by a factory from the case's inputs, so that only what
is measured next takes memory; a factory that cannot serve raises `Missing` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

Value = TypeVar("Value")
Shape = dict[str, int | float | str]
Measure = Literal["events", "graph", "samples"]
# (inputs, context) -> what to time: a callable, or several over different buffers, used in turn.
Factory = Callable[[Any, "Context"], Any]


class Missing(Exception):
    """A contender that cannot run on this machine. The message is the reason that is reported."""


@dataclass(frozen=True)
class Round:
    """What one round of a contender measured itself (measure="samples").

    values: one or more samples in the case's unit. extra: other figures of the same run, by name.
    note: what else is to be said about them.
    """

    values: tuple[float, ...]
    extra: dict[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass
class Context:
    """How this run measures, and what its cases share.

    device: where. tiny: the shapes of a test on a CPU. rounds: interleaved rounds a case.
    rep_ms: how long one round of a kernel lasts. kvpress_python: an interpreter that has kvpress.
    vllm_site: a folder of packages that has vLLM.
    """

    device: torch.device
    tiny: bool = False
    rounds: int = 3
    rep_ms: float = 60.0
    kvpress_python: str | None = None
    vllm_site: str | None = None
    shared: dict[str, tuple[Any, Exception | None]] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device.type == "cuda"

    def need_gpu(self, what: str) -> None:
        """Raise Missing unless the device is a CUDA device."""
        if not self.on_gpu:
            raise Missing(f"{what} needs a CUDA device")

    def once(self, key: str, make: Callable[[], Value]) -> Value:
        """`make()` at the first call with this key; later the same value, or the same error."""
        if key not in self.shared:
            try:
                self.shared[key] = make(), None
            except Exception as error:  # an expensive failure is not tried again
                self.shared[key] = None, error.with_traceback(None)
        value, failure = self.shared[key]
        if failure is not None:
            raise failure
        return value


@dataclass(frozen=True)
class Condition:
    """`metric op bound`, as in "ratio.sdpa_cudnn >= 0.95"; what metrics exist: `results.judge`."""

    metric: str
    op: Literal["<=", ">="]
    bound: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        """From its text. Raises ValueError on anything else than three words."""
        words = text.split()
        if len(words) != 3 or words[1] not in ("<=", ">="):
            raise ValueError(f"expected 'metric <= number' or 'metric >= number', got {text!r}")
        return cls(words[0], "<=" if words[1] == "<=" else ">=", float(words[2]))

    def holds(self, metrics: Mapping[str, float]) -> bool | None:
        """True or False; None where the metric was not measured."""
        value = metrics.get(self.metric)
        if value is None:
            return None
        return value <= self.bound if self.op == "<=" else value >= self.bound


@dataclass(frozen=True)
class Target:
    """A target in words and in conditions; `stretch` is what would be better still."""

    text: str
    conditions: tuple[Condition, ...]
    stretch: tuple[Condition, ...] = ()

    def met(self, metrics: Mapping[str, float]) -> str:
        """ "yes", "no", "stretch" (more than asked), or "unknown: no <metric>"."""
        held = [condition.holds(metrics) for condition in self.conditions]
        if False in held:
            return "no"
        if None in held:
            return f"unknown: no {self.conditions[held.index(None)].metric}"
        if self.stretch and all(condition.holds(metrics) for condition in self.stretch):
            return "stretch"
        return "yes"


def target(text: str, *conditions: str, stretch: str | None = None) -> Target:
    """A Target whose conditions are written as text."""
    more = () if stretch is None else (Condition.parse(stretch),)
    return Target(text, tuple(map(Condition.parse, conditions)), more)


@dataclass(frozen=True)
class Case:
    """One thing in one shape.

    what: the words of the table. group: one of `registry.GROUPS`. inputs: made once, for all
    contenders. ours, peers: factories by name; names of our own variants start with "ours".
    measure: CUDA events, a CUDA graph, or samples that the contender takes itself.
    bytes, flops: of one call of ours. roof: the ceiling that bounds it.
    versus: `name` of an earlier case; metric "share" is our time over its time.
    rounds: at most so many, whatever the context says. about: the settings of ours, in words.
    """

    what: str
    group: str
    shape: Shape
    inputs: Callable[[Context], Any]
    ours: Factory
    peers: Mapping[str, Factory] = field(default_factory=dict)
    measure: Measure = "events"
    unit: str = "ms"
    better: Literal["low", "high"] = "low"
    bytes: float | None = None
    flops: float | None = None
    roof: Literal["copy", "matmul"] | None = None
    target: Target | None = None
    versus: str | None = None
    rounds: int | None = None
    about: str = ""

    @property
    def name(self) -> str:
        """Unique in the registry: "prefill attention B=1 T=4096"."""
        return name_of(self.what, self.shape)

    @property
    def contenders(self) -> dict[str, Factory]:
        """Ours first, then the peers."""
        return {"ours": self.ours, **self.peers}


def name_of(what: str, shape: Shape) -> str:
    """The name of a case."""
    return " ".join([what, *(f"{key}={value}" for key, value in shape.items())])
