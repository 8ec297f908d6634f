"""The figures of a row: what the requests of a workload saw."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from sparsekv.bench.serve.load import Trace
from sparsekv.bench.serve.workload import Workload


def figures(workload: Workload, traces: Sequence[Trace]) -> dict[str, float]:
    """Throughput and latencies of the requests that succeeded; the others are counted.

    Throughput is tokens by the seconds from the first sending to the last token. TTFT is the time
    from the sending to the first token; time per output token (tpot) is that from the first to the
    last by the tokens between, of each request; inter-token latency (itl) is each gap on its own.
    Percentiles interpolate between samples. No request succeeded: only the failures.
    """
    good = [trace for trace in traces if not trace.error]
    failures = float(len(traces) - len(good))
    if not good:
        return {"failures": failures}
    seconds = max(t.times[-1] for t in good) - min(t.sent for t in good)
    new, prompt = sum(t.tokens for t in good), len(good) * workload.prompt_tokens
    ttft = [t.times[0] - t.sent for t in good]
    tpot = [(t.times[-1] - t.times[0]) / (t.tokens - t.counts[0]) for t in good if len(t.times) > 1]
    itl = [b - a for t in good for a, b in pairwise(t.times)]
    return {
        "out_tok_s": new / seconds,
        "total_tok_s": (new + prompt) / seconds,
        "failures": failures,
        "seconds": seconds,
        **_percentiles("ttft", ttft, (50, 90, 99)),
        **_percentiles("tpot", tpot, (50, 99)),
        **_percentiles("itl", itl, (99,)),
    }


def _percentiles(name: str, seconds: list[float], wanted: Sequence[int]) -> dict[str, float]:
    """{"ttft_p50_ms": ...}; nothing of an empty list."""
    if not seconds:
        return {}
    values = np.percentile(np.asarray(seconds), wanted) * 1e3
    return {f"{name}_p{p}_ms": float(v) for p, v in zip(wanted, values, strict=True)}
