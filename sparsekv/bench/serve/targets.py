"""What was asked of serving: on an H200, a model of Llama-3-8B's shape, beside dense vLLM."""

from __future__ import annotations

from collections.abc import Sequence

from sparsekv.bench.case import Shape, Target, target
from sparsekv.bench.results import MEASURED, Row
from sparsekv.bench.serve.plan import DENSE, FULL
from sparsekv.bench.serve.workload import CLOSED

DEVICE, MODEL = "H200", "llama-8b"
_SEED = {"in": 4000, "out": 500, "kv_gib": 6.0}  # what a 24 GB card has left beside 8B weights
_NO_OP = target("≥ 0.99× dense out tok/s", "times_dense >= 0.99")
# (numbers of the case, target of a policy)
_TARGETS: tuple[tuple[Shape, Target], ...] = (
    ({**_SEED, "concurrency": 40}, target("≥ 2.0× dense out tok/s", "times_dense >= 2.0")),
    ({**_SEED, "concurrency": 20}, target("TTFT p50 < 1 s", "ttft_p50_ms <= 1000")),
    (
        {"in": 4000, "concurrency": 64, "kv_gib": 80.0},
        target("step ≤ 8.1 ms", "step_p50_ms <= 8.1"),
    ),
    (
        {"in": 32000, "concurrency": 8, "kv_gib": 80.0},
        target("step ≤ 6.4 ms", "step_p50_ms <= 6.4"),
    ),
)


def compare(rows: Sequence[Row], judged: bool) -> None:
    """Set `times_dense` of every other row with a dense one beside it, and whether targets are met.

    judged: the machine and the model are those that the targets speak of.
    """
    dense = {row.case: row for row in rows if row.contender == DENSE and row.status == MEASURED}
    for row in rows:
        base = dense.get(row.case)
        row.extra.pop("times_dense", None)
        if base is not None and base is not row and base.value and row.value is not None:
            row.extra["times_dense"] = row.value / base.value
        wanted = _wanted(row) if judged else None
        if wanted is not None:
            row.target = wanted.text
            unknown = f"unknown: {row.status}"
            row.met = wanted.met(row.extra) if row.status == MEASURED else unknown


def _wanted(row: Row) -> Target | None:
    if row.contender == DENSE or row.what != CLOSED:
        return None
    if row.contender == FULL:
        return _NO_OP
    for numbers, wanted in _TARGETS:
        if numbers.items() <= row.shape.items():
            return wanted
    return None
