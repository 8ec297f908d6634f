"""What is plotted of the serving benchmark: throughput and TTFT by load, a line a mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sparsekv.bench.results import MEASURED, Row
from sparsekv.bench.serve.record import GROUP
from sparsekv.bench.serve.workload import CLOSED, POISSON

Points = dict[str, list[tuple[float, float]]]


class Curve(NamedTuple):
    """One picture: (x, y) of each line, labels of the axes, title and file."""

    lines: Points
    x: str
    y: str
    title: str
    file: str


# (what, number of the case that is x, its label)
_LOADS = ((CLOSED, "concurrency", "clients"), (POISSON, "rate", "requests a second"))
# (short name, figure, label)
_FIGURES = (
    ("throughput", "out_tok_s", "output tokens a second"),
    ("ttft", "ttft_p50_ms", "TTFT p50, ms"),
    ("ttft_p99", "ttft_p99_ms", "TTFT p99, ms"),
)


def curves(rows: Sequence[Row]) -> Iterator[Curve]:
    """One a load, length, KV memory and figure, of the rows that were measured."""
    measured = [row for row in rows if row.group == GROUP and row.status == MEASURED]
    for what, x, x_label in _LOADS:
        own = [row for row in measured if row.what == what]
        for key in dict.fromkeys(_setting(row) for row in own):
            for name, figure, y_label in _FIGURES:
                lines: Points = {}
                for row in own:
                    y = row.value if figure == "out_tok_s" else row.extra.get(figure)
                    if _setting(row) == key and y is not None:
                        lines.setdefault(row.contender, []).append((float(row.shape[x]), y))
                prompt, new, memory = key
                title = f"{what}, {prompt} tokens in, {new} out, KV GiB: {memory}"
                yield Curve(
                    lines, x_label, y_label, title, f"serve_{x}_{name}_{prompt}_{new}_{memory}.png"
                )


def _setting(row: Row) -> tuple[object, object, object]:
    return row.shape["in"], row.shape["out"], row.shape["kv_gib"]
