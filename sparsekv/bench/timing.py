"""Time: CUDA events with a cold L2, replays of a CUDA graph, the wall clock on a CPU.

`prepare` turns a contender into a function that measures one round; the runner calls the rounds of
all contenders in turn, so that a drift of clocks or temperature meets all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from sparsekv.bench.case import Context, Measure, Round

Call = Callable[[], Any]
_GRAPH_LAUNCHES = 40  # launches a graph at least: the gap between two replays does not count
_REPLAYS = 5
_CPU_CALLS = 3
ROTATE_BYTES = 256 << 20  # buffers used in turn are together several times the L2


def prepare(measure: Measure, contender: Any, context: Context) -> Callable[[], Round]:
    """A function that measures one round of `contender`, warmed up.

    contender: what its factory returned; for "samples" a callable that returns a Round or a float,
    else a callable or a list of them.
    """
    if measure == "samples":
        return lambda: _as_round(contender())
    calls: Sequence[Call] = contender if isinstance(contender, list) else [contender]
    if not context.on_gpu:
        return lambda: wall(calls)
    if measure == "graph":
        return graphed(calls)
    return lambda: events(calls[0], context.rep_ms)


def _as_round(result: Round | float) -> Round:
    return result if isinstance(result, Round) else Round((float(result),))


def wall(calls: Sequence[Call]) -> Round:
    """Milliseconds of some calls by the host's clock."""
    calls[0]()
    samples = []
    for i in range(_CPU_CALLS):
        start = time.perf_counter()
        calls[i % len(calls)]()
        samples.append((time.perf_counter() - start) * 1e3)
    return Round(tuple(samples))


def events(call: Call, rep_ms: float) -> Round:
    """Median milliseconds of a call between CUDA events; the L2 is cleared before each."""
    from triton.testing import do_bench

    return Round((float(do_bench(call, warmup=10, rep=int(rep_ms), return_mode="median")),))


def graphed(calls: Sequence[Call]) -> Callable[[], Round]:
    """Capture the calls, each as often as the others, in one graph; a round replays it."""
    launches = len(calls) * -(-_GRAPH_LAUNCHES // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compile before the capture
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            for i in range(launches):
                calls[i % len(calls)]()
    except Exception:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):  # ends what the failed capture began
            torch.zeros(1, device="cuda")
        raise

    # The calls stay alive with the graph: it reads memory that they own (a peer's plan, scales).
    return partial(_replayed, graph, launches, calls)


def _replayed(graph: torch.cuda.CUDAGraph, launches: int, calls: Sequence[Call]) -> Round:
    """One round of a graph of so many launches."""
    graph.replay()
    return Round(tuple(_between(graph.replay) / launches for _ in range(_REPLAYS)))


def _between(call: Call) -> float:
    """Milliseconds of one call between two CUDA events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copies(bytes_each: float, context: Context) -> int:
    """How many buffers to use in turn, so that none of them is still in the L2."""
    if not context.on_gpu:
        return 2
    return max(1, min(128, -(-ROTATE_BYTES // max(1, int(bytes_each)))))


def ceilings(context: Context) -> dict[str, float]:
    """What this machine can do: copy_tbs (bytes read and written) and matmul_tflops (bf16)."""
    count, size = (1 << 20, 256) if not context.on_gpu else (1 << 30, 8192)
    source = torch.empty(count, dtype=torch.uint8, device=context.device).random_()
    sink = torch.empty_like(source)
    dtype = torch.bfloat16 if context.on_gpu else torch.float32
    a, b = (torch.randn(size, size, device=context.device, dtype=dtype) for _ in range(2))
    calls = {"copy": lambda: sink.copy_(source), "matmul": lambda: a @ b}
    best = {}
    for name, call in calls.items():
        rounds = [
            wall([call]) if not context.on_gpu else events(call, 100) for _ in range(3)
        ]  # the best of three medians: a ceiling is not a typical value
        best[name] = min(value for one in rounds for value in one.values)
    return {
        "copy_tbs": 2 * count / best["copy"] * 1e3 / 1e12,
        "matmul_tflops": 2 * size**3 / best["matmul"] * 1e3 / 1e12,
    }
