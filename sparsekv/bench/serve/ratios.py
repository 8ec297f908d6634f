"""The table of the serving benchmark: a line a mode, each figure beside its ratio to dense."""

from __future__ import annotations

from collections.abc import Sequence

from sparsekv.bench.results import MEASURED, Row
from sparsekv.bench.serve.plan import DENSE

# (column, figure, digits, whether its ratio to dense is shown)
_COLUMNS = (
    ("out tok/s", "value", 0, True),
    ("total tok/s", "total_tok_s", 0, False),
    ("TTFT p50 ms", "ttft_p50_ms", 0, True),
    ("p90", "ttft_p90_ms", 0, False),
    ("p99", "ttft_p99_ms", 0, True),
    ("ms a token p50", "tpot_p50_ms", 2, True),
    ("p99", "tpot_p99_ms", 2, False),
    ("step p50 ms", "step_p50_ms", 2, True),
    ("running mean", "running_mean", 1, True),
    ("max", "running_max", 0, False),
    ("preempted", "preemptions", 0, False),
    ("KV blocks mean", "kv_blocks_mean", 0, False),
    ("max", "kv_blocks_max", 0, False),
    ("KV GiB mean", "kv_gib_mean", 2, False),
    ("max", "kv_gib_max", 2, True),
    ("failed", "failures", 0, False),
)


def ratio_table(cases: Sequence[Sequence[Row]]) -> str:
    """Markdown of the rows of all cases of one kind, dense first in each.

    "2200 (1.91×)" is 1.91 times the figure of dense vLLM in the same case.
    """
    names = list(dict.fromkeys(name for case in cases for name in case[0].shape))
    head = [*names, "mode", *(column for column, *_ in _COLUMNS), "target", "met"]
    lines = [head, ["---"] * len(head)]
    for case in cases:
        rows = sorted(case, key=lambda row: row.contender != DENSE)
        dense = next((row for row in rows if row.contender == DENSE), None)
        for row in rows:
            numbers = [str(row.shape.get(name, "")) for name in names]
            figures = [row.status] + [""] * (len(_COLUMNS) - 1)
            if row.status == MEASURED:
                figures = [_shown(row, dense, *column[1:]) for column in _COLUMNS]
            lines.append([*numbers, row.contender, *figures, row.target, row.met])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(row: Row, dense: Row | None, key: str, digits: int, compared: bool) -> str:
    value, base = _figure(row, key), None if dense is None else _figure(dense, key)
    if value is None:
        return ""
    text = f"{value:.{digits}f}"
    return f"{text} ({value / base:.2f}×)" if compared and base and row is not dense else text


def _figure(row: Row, key: str) -> float | None:
    return row.value if key == "value" else row.extra.get(key)
