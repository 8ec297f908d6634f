"""From records to a table with intervals, what it says, and its picture."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparsekv.evaluation.intervals import Sums, interval
from sparsekv.plotting import pyplot

Row = dict[str, Any]
DENSE = "dense"  # the label of the arm that keeps everything
ALL = "all"  # in place of a task: all of a kind
ACCURACY = ("em", "acc", "mc", "score")  # of these more is better; of nll, less
HELD = ("kept", "kv_bytes", "dense_kv_bytes")
# Of what can be an axis: its name and its unit.
AXES = {"kept": ("tokens kept a KV head", 1), "kv_bytes": ("MiB of keys and values a row", 1 << 20)}
_MARKERS = "osv^D*"


def bootstrap(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Mean of one value a context, and its 95 % interval; a single value has none."""
    sums = Sums(np.asarray(values, dtype=float), np.ones(len(values)))
    return sums.mean, *(interval(sums.draws()) if len(values) > 1 else (None, None))


def span(row: Row, name: str = "", form: str = ".2f") -> str:
    """The interval in brackets; nothing if there is none."""
    low, high = row[f"{name}low"], row[f"{name}high"]
    return "" if low is None else f" [{low:{form}}, {high:{form}}]"


def by_context(records: Iterable[Row]) -> dict[str, float]:
    """Each context's mean of the task's headline metric over its questions; nothing of what was
    refused, even if it was answered in part."""
    values: dict[str, list[float]] = {}
    for record in records:
        if record.get("refused") is not None:
            return {}
        values.setdefault(record["example"], []).append(record[record["headline"]])
    return {example: float(np.mean(of)) for example, of in values.items()}


def summary(records: Sequence[Row]) -> Row:
    """Mean score over contexts with its interval, and what was kept; or why there is nothing."""
    scores = by_context(records)
    if not scores:
        reasons = (record.get("refused") for record in records)
        return {"metric": None, "refused": next(filter(None, reasons), None)}
    mean, low, high = bootstrap(list(scores.values()))
    held = {name: float(np.mean([record.get(name, 0) for record in records])) for name in HELD}
    metric = {"metric": records[0]["headline"], "contexts": len(scores)}
    return metric | {"score": mean, "low": low, "high": high} | held


def differences(scores: Mapping[str, float], base: Mapping[str, float]) -> dict[str, float]:
    """Score minus base on each context that both have."""
    return {example: scores[example] - base[example] for example in scores if example in base}


def columns(name: str, values: Sequence[float]) -> Row:
    """Mean and interval as three columns."""
    found = bootstrap(values) if values else (None, None, None)
    return dict(zip((name, f"{name}_low", f"{name}_high"), found, strict=True))


class Comparison(NamedTuple):
    """Of an arm with another one, over all budgets, all tasks that give losses, or accuracies."""

    arm: str
    other: str
    protocol: str
    loss: bool


def overall(comparison: Comparison, gaps: Mapping[str, Sequence[Mapping[str, float]]]) -> Row:
    """A row for a comparison. gaps: by task, for each budget the differences by context.

    Tasks weigh the same, and so do budgets. Contexts are drawn anew within each task; the budgets
    of a context stay together, since they are not independent.
    """
    tasks = []
    for budgets in gaps.values():
        contexts = dict.fromkeys(example for gap in budgets for example in gap)
        means = [np.mean([gap[c] for gap in budgets if c in gap]) for c in contexts]
        tasks.append(Sums(np.array(means), np.ones(len(means))))
    counts = [len(task.total) for task in tasks]
    drawn = [task.draws(name) for name, task in zip(gaps, tasks, strict=True)]
    low, high = interval(np.mean(drawn, axis=0))
    row: Row = {"arm": comparison.arm, "task": ALL, "protocol": comparison.protocol}
    row |= {"metric": "nll" if comparison.loss else "accuracy", "contexts": sum(counts)}
    row |= {"other": comparison.other, "to_other": float(np.mean([task.mean for task in tasks]))}
    alone = min(counts) == 1
    return row | {"to_other_low": None if alone else low, "to_other_high": None if alone else high}


def compared(rows: Sequence[Row]) -> list[str]:
    """A line for each protocol, metric and arm that others are compared with: who is better than
    it, who is worse, and who cannot be told apart, because the interval covers 0."""
    lines = []
    whole = [row for row in rows if row["task"] == ALL]
    for key in dict.fromkeys((r["protocol"], r["metric"], r["other"]) for r in whole):
        sides: dict[str, list[str]] = {"better": [], "worse": [], "not told apart": []}
        for row in (r for r in whole if (r["protocol"], r["metric"], r["other"]) == key):
            low, high = row["to_other_low"], row["to_other_high"]
            text = f"{row['arm']} {row['to_other']:+.3f}"
            if low is None or low <= 0 <= high:
                side = "not told apart"
            else:
                side = "better" if (low > 0) == (row["metric"] == "accuracy") else "worse"
            sides[side].append(text + span(row, "to_other_", "+.3f"))
        said = "; ".join(f"*{side}*: {' · '.join(arms)}" for side, arms in sides.items() if arms)
        lines.append(f"{key[0]}, {key[1]} against **{key[2]}**: {said}.")
    return lines


def plot_panels(rows: Sequence[Row], x: str, title: str, out: Path) -> None:
    """A panel a protocol and task: a line an arm, with intervals; the dense score is dashed."""
    plt = pyplot("the plots")
    rows = [row for row in rows if row.get("score") is not None]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    protocols = list(dict.fromkeys(row["protocol"] for row in rows))
    labels = [label for label in dict.fromkeys(row["arm"] for row in rows) if label != DENSE]
    colors = {label: plt.cm.tab20(i % 20) for i, label in enumerate(labels)}
    figure, grid = plt.subplots(
        len(protocols), len(tasks), squeeze=False, sharey="col", layout="constrained",
        figsize=(3.4 * len(tasks) + 2, 2.9 * len(protocols) + 0.4),
    )  # fmt: skip
    panels = [(protocol, task) for protocol in protocols for task in tasks]
    for axes, (protocol, task) in zip(grid.flat, panels, strict=True):
        cell = [row for row in rows if (row["protocol"], row["task"]) == (protocol, task)]
        if not cell:
            axes.axis("off")
            continue
        for i, label in enumerate(labels):
            _line(axes, [r for r in cell if r["arm"] == label], x, colors[label], i)
        for row in cell:
            if row["arm"] == DENSE:
                axes.axhline(row["score"], color="black", lw=0.8, ls="--")
        axes.set(xlabel=AXES[x][0], ylabel=cell[0]["metric"])
        doubling(axes)
        axes.set_title(f"{task}, {protocol}", fontsize=9)
    shown = {label: line for axes in grid.flat for line, label in zip(*_legend(axes), strict=True)}
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(out, dpi=80)
    plt.close(figure)


def doubling(axes: Any) -> None:
    """A logarithmic x axis with plain numbers at powers of two."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _line(axes: Any, rows: Sequence[Row], x: str, color: Any, number: int) -> None:
    rows = sorted(rows, key=lambda row: row[x])
    if rows:
        ends = [[row[end] for row in rows] for end in ("score", "low", "high")]
        score, low, high = (np.array(values, dtype=float) for values in ends)  # None is NaN
        axes.errorbar(
            [row[x] / AXES[x][1] for row in rows], score, [abs(score - low), abs(high - score)],
            label=rows[0]["arm"], color=color, marker=_MARKERS[number % len(_MARKERS)],
            ms=4, lw=1, elinewidth=0.6,
        )  # fmt: skip


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    lines, labels = axes.get_legend_handles_labels()
    return lines, labels


def write_csv(rows: Sequence[Row], file: Path) -> None:
    """All columns that any row has; None is an empty cell."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def read_csv(file: Path) -> list[Row]:
    """Rows as they were written: numbers are numbers, empty cells None."""
    with file.open(newline="", encoding="utf-8") as lines:
        return [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(lines)]


def _value(text: str) -> Any:
    if text == "":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
