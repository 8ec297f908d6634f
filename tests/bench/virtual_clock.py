"""An event loop whose time is made up, and an engine that lives in it: exact figures, at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sparsekv.bench.serve.steps import StepLog

Value = TypeVar("Value")


class _Selector(selectors.SelectSelector):
    """Instead of waiting it moves the loop's clock."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits for something that never comes"
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        selector = _Selector()
        selector.loop = self
        self.now = 0.0
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run(work: Coroutine[Any, Any, Value]) -> Value:
    """asyncio.run in virtual time, from 0."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


@dataclass
class FakeEngine:
    """Batches continuously: each step lasts `step_s` and gives every running request a token.

    most: requests that run at once; the others wait. fails: requests by number (from 0) that raise;
    short: those that end a token early. blocks: what a running request holds of a pool of 100.
    """

    step_s: float = 0.01
    most: int = 1000
    fails: frozenset[int] = frozenset()
    short: frozenset[int] = frozenset()
    blocks: int = 1
    log: StepLog = field(default_factory=StepLog)
    seen: list[tuple[float, tuple[int, ...], int]] = field(default_factory=list)
    at_once: int = 0
    waiting: list[tuple[asyncio.Queue[int], int]] = field(default_factory=list)
    running: list[list[Any]] = field(default_factory=list)
    stepping: asyncio.Task[None] | None = None

    async def generate(self, prompt: list[int], new: int) -> AsyncIterator[int]:
        loop = asyncio.get_running_loop()
        self.log.clock = loop.time
        number = len(self.seen)
        self.seen.append((loop.time(), tuple(prompt), new))
        if number in self.fails:
            raise RuntimeError("no\nthanks")
        queue: asyncio.Queue[int] = asyncio.Queue()
        length = new - 1 if number in self.short else new
        self.waiting.append((queue, length))
        if self.stepping is None or self.stepping.done():
            self.stepping = asyncio.create_task(self._steps())
        for _ in range(length):
            yield await queue.get()

    async def _steps(self) -> None:
        while self.waiting or self.running:
            while self.waiting and len(self.running) < self.most:
                self.running.append(list(self.waiting.pop(0)))
            self.at_once = max(self.at_once, len(self.running) + len(self.waiting))
            await asyncio.sleep(self.step_s)
            for request in self.running:
                request[0].put_nowait(1)
                request[1] -= 1
            self.running = [request for request in self.running if request[1]]
            held = len(self.running) * self.blocks / 100
            self.log.add(len(self.running), len(self.waiting), held, 0)
