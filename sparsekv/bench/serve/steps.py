"""What an engine says of itself after each of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median


@dataclass(frozen=True)
class Step:
    """The state at the end of a step.

    time: seconds. running, waiting: requests. held: fraction of the KV blocks that requests hold.
    preempted: requests that this step reports as having been preempted.
    """

    time: float
    running: int
    waiting: int
    held: float
    preempted: int


@dataclass
class StepLog:
    """All steps since the last `clear`. clock: seconds, the one that requests are timed by."""

    clock: Callable[[], float] = time.monotonic
    steps: list[Step] = field(default_factory=list)

    def add(self, running: int, waiting: int, held: float, preempted: int) -> None:
        """One more step has ended."""
        self.steps.append(Step(self.clock(), running, waiting, held, preempted))

    def clear(self) -> None:
        """Forget what came before a measurement."""
        self.steps.clear()

    def figures(self, blocks: int, block_bytes: float) -> dict[str, float]:
        """Means and maxima over the steps, of times in ms and of KV blocks in GiB as well.

        blocks: in the engine's pool. block_bytes: of one, over all layers that share it. A step
        that follows one with nothing running has no time of its own. No steps: no figures.
        """
        if not self.steps:
            return {}
        busy = [(b.time - a.time) * 1e3 for a, b in pairwise(self.steps) if a.running]
        running = [step.running for step in self.steps]
        held = [round(step.held * blocks) for step in self.steps]
        gib = block_bytes / 2**30
        figures = {
            "step_p50_ms": median(busy) if busy else 0.0,
            "step_mean_ms": fmean(busy) if busy else 0.0,
            "steps": len(self.steps),
            "running_mean": fmean(running),
            "running_max": max(running),
            "waiting_max": max(step.waiting for step in self.steps),
            "preemptions": sum(step.preempted for step in self.steps),
            "kv_blocks": blocks,
            "kv_blocks_mean": fmean(held),
            "kv_blocks_max": max(held),
            "kv_blocks_left": held[-1],
            "kv_gib_mean": fmean(held) * gib,
            "kv_gib_max": max(held) * gib,
        }
        return {name: float(value) for name, value in figures.items()}
