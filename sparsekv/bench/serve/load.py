"""Send a workload to an engine and note when each request's tokens came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from sparsekv.bench.serve.workload import Workload, arrivals

_REASON = 300  # characters kept of an error


class Engine(Protocol):
    """What requests are sent to."""

    def generate(self, prompt: list[int], new: int) -> AsyncIterator[int]:
        """Numbers of tokens that have come since the last time, until `new` are there."""
        ...


@dataclass
class Trace:
    """One request, in seconds of the event loop's clock.

    sent: when. times, counts: when tokens came, and how many. error: why it failed, or "".
    """

    sent: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def tokens(self) -> int:
        """Tokens that came."""
        return sum(self.counts)


async def drive(
    engine: Engine, workload: Workload, prompts: list[list[int]], seed: int
) -> list[Trace]:
    """Send every prompt when the workload says; a trace for each, in the order of sending.

    prompts: [requests][prompt_tokens]. seed: of the Poisson arrivals. A request that fails, or
    that ends at another length, is a trace with an error.
    """
    if len(prompts) != workload.requests:
        raise ValueError(f"expected {workload.requests} prompts, got {len(prompts)}")
    traces: list[Trace] = []
    start = asyncio.get_running_loop().time()
    tasks = [
        asyncio.create_task(_client(engine, workload.output_tokens, start + delay, queue, traces))
        for delay, queue in _clients(workload, prompts, seed)
    ]
    try:
        await asyncio.gather(*tasks)
    finally:  # where one raised, or the whole was stopped, nothing is left running
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return traces


def _clients(
    workload: Workload, prompts: list[list[int]], seed: int
) -> Iterator[tuple[float, Iterable[list[int]]]]:
    """(seconds after the start, the prompts it sends one after another) of every client.

    The clients of a closed loop take theirs from one queue; with Poisson arrivals each request is
    a client of its own.
    """
    if workload.concurrency is None:
        for delay, prompt in zip(arrivals(workload, seed), prompts, strict=True):
            yield delay, [prompt]
        return
    queue = iter(prompts)
    clients = min(workload.concurrency, workload.requests)
    for i in range(clients):
        yield i * workload.ramp / clients, queue


async def _client(
    engine: Engine, new: int, at: float, queue: Iterable[list[int]], traces: list[Trace]
) -> None:
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(max(0.0, at - clock()))
    for prompt in queue:
        trace = Trace(clock())
        traces.append(trace)
        try:
            async for count in engine.generate(prompt, new):
                trace.times.append(clock())
                trace.counts.append(count)
        except Exception as error:  # a request that is refused is a result of the run
            trace.error = reason(error)
            continue
        if trace.tokens != new:
            trace.error = f"expected {new} tokens, got {trace.tokens}"


def reason(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())[:_REASON]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
