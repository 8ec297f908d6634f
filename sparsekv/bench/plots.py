"""PNG plots of a result file: bars against the roof, curves by context and, of serving, by load."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparsekv.bench.context_cases import BY_CONTEXT
from sparsekv.bench.memory_cases import BY_LENGTH
from sparsekv.bench.results import Results, Row
from sparsekv.bench.serve.curves import Points, curves
from sparsekv.plotting import pyplot

_KERNEL_GROUPS = ("prefill", "decode", "cache", "statistics")
# (what of the rows, which figure of them, axis, file)
_CURVES = (
    (BY_CONTEXT, "value", "ms a token, B=1", "token_time.png"),
    (BY_LENGTH, "value", "KV MiB, B=1", "kv_memory.png"),
    (BY_LENGTH, "peak_mib", "peak MiB over the weights, B=1", "peak_memory.png"),
)
_DPI = 130


def draw(results: Results, out: Path) -> list[Path]:
    """Write the plots that the rows allow to folder `out`; returns their paths.

    Raises ValueError if matplotlib is not installed.
    """
    plt = pyplot("the plots")
    drawn = [_bars(plt, results, group, out) for group in _KERNEL_GROUPS]
    for what, key, label, name in _CURVES:
        points = _points(results.rows, what, key)
        drawn.append(_lines(plt, points, "prompt tokens", label, out / name))
    for curve in curves(results.rows):
        drawn.append(_lines(plt, curve.lines, curve.x, curve.y, out / curve.file, curve.title))
    return [path for path in drawn if path is not None]


def _bars(plt: Any, results: Results, group: str, out: Path) -> Path | None:
    """A bar a contender and case, as its fraction of the roof that bounds the case."""
    rows = [row for row in results.rows if row.group == group and row.roof is not None]
    if not rows:
        return None
    cases = list(dict.fromkeys(row.case for row in rows))
    names = list(dict.fromkeys(row.contender for row in rows))
    figure, axes = plt.subplots(figsize=(max(6.0, 1.1 * len(cases)), 4.5))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        own = {row.case: row.roof for row in rows if row.contender == name}
        places = [c + (i - (len(names) - 1) / 2) * width for c in range(len(cases))]
        axes.bar(places, [own.get(case, 0.0) for case in cases], width, label=name)
    axes.axhline(1.0, color="black", linewidth=1, label="measured ceiling")
    axes.set_xticks(range(len(cases)), cases, rotation=35, ha="right", fontsize=7)
    axes.set_ylabel("fraction of the ceiling")
    axes.set_title(f"{group}, {results.machine.get('device', '')}")
    axes.legend(fontsize=7)
    return _save(plt, figure, out / f"{group}_roof.png")


def _points(rows: Iterable[Row], what: str, key: str) -> Points:
    """A line a contender: (prompt tokens, the row's value or another of its figures)."""
    lines: Points = {}
    for row in rows:
        y = row.value if key == "value" else row.extra.get(key)
        if row.what == what and y is not None:
            lines.setdefault(row.contender, []).append((float(row.shape["S"]), y))
    return lines


def _lines(
    plt: Any, lines: Points, x_label: str, y_label: str, path: Path, title: str = ""
) -> Path | None:
    if not lines:
        return None
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name, points in lines.items():
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, marker="o", markersize=4, label=name)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    return _save(plt, figure, path)


def _save(plt: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)
    return path
