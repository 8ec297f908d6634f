"""From records to a table with intervals, what it says, and its picture."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsekv.evaluation.intervals import bootstrap
from sparsekv.plotting import pyplot

Row = dict[str, Any]
DENSE = "dense"  # the label of the arm that keeps everything
ACCURACY = ("em", "acc", "mc", "score")  # of these more is better; of nll, less
HELD = ("kept", "kv_bytes", "dense_kv_bytes")
AXES = {"kept": "tokens kept a KV head", "kv_bytes": "bytes of keys and values a row"}
_MARKERS = "osv^D*"


def by_context(records: Iterable[Row]) -> dict[str, float]:
    """Each context's mean of the task's headline metric over its questions."""
    values: dict[str, list[float]] = {}
    for record in records:
        if record.get("refused") is None:
            values.setdefault(record["example"], []).append(record[record["headline"]])
    return {example: float(np.mean(of)) for example, of in values.items()}


def summary(records: Sequence[Row], scores: Mapping[str, float]) -> Row:
    """Mean score over contexts with its interval, and what was kept; or why there is nothing."""
    if not scores:
        return {"refused": records[0].get("refused")}
    mean, low, high = bootstrap(list(scores.values()))
    held = {name: float(np.mean([record[name] for record in records])) for name in HELD}
    metric = {"metric": records[0]["headline"], "contexts": len(scores)}
    return metric | {"score": mean, "low": low, "high": high} | held


def paired(name: str, scores: Mapping[str, float], base: Mapping[str, float]) -> Row:
    """Mean difference to `base` over the contexts of both, with its interval."""
    both = [scores[example] - base[example] for example in scores if example in base]
    found = bootstrap(both) if both else (None, None, None)
    return dict(zip((f"to_{name}", f"to_{name}_low", f"to_{name}_high"), found, strict=True))


def compared(rows: Sequence[Row]) -> list[str]:
    """A line for each arm that is compared with another one, protocol by protocol."""
    pairs = dict.fromkeys((row["arm"], row["other"]) for row in rows if row["other"])
    protocols = dict.fromkeys(row["protocol"] for row in rows)
    lines = []
    for arm, other in pairs:
        mine = [row for row in rows if row["arm"] == arm and row["to_other"] is not None]
        parts = []
        for protocol in protocols:
            cells = [row for row in mine if row["protocol"] == protocol]
            parts += [f"{protocol}: {verdict(cells)}"] if cells else []
        lines += [f"{arm} against {other}: {'; '.join(parts)}."] if parts else []
    return lines


def verdict(cells: Sequence[Row]) -> str:
    """Mean difference to the other arm, and in how many cells it is certain: the 95 % interval of
    the paired difference leaves out 0."""
    gains = []  # (low, high), positive is better
    for cell in cells:
        low, high = cell["to_other_low"], cell["to_other_high"]
        gains.append((low, high) if cell["metric"] in ACCURACY else (-high, -low))
    means = []
    for name, metrics in (("accuracy", ACCURACY), ("nll", ("nll",))):
        values = [cell["to_other"] for cell in cells if cell["metric"] in metrics]
        means += [f"{name} {np.mean(values):+.3f}"] if values else []
    better, worse = sum(low > 0 for low, _ in gains), sum(high < 0 for _, high in gains)
    counts = f"better in {better} and worse in {worse} of {len(cells)} cells"
    return f"{', '.join(means)} on average, {counts}"


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
        for i, label in enumerate(labels):
            _line(axes, [r for r in cell if r["arm"] == label], x, colors[label], i)
        for row in cell:
            if row["arm"] == DENSE:
                axes.axhline(row["score"], color="black", lw=0.8, ls="--")
        axes.set(xscale="log", xlabel=AXES[x], ylabel=cell[0]["metric"] if cell else "")
        axes.set_title(f"{task}, {protocol}", fontsize=9)
    shown = {label: line for axes in grid.flat for line, label in zip(*_legend(axes), strict=True)}
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(out, dpi=80)
    plt.close(figure)


def _line(axes: Any, rows: Sequence[Row], x: str, color: Any, number: int) -> None:
    rows = sorted(rows, key=lambda row: row[x])
    if rows:
        low, high = ([abs(row["score"] - row[end]) for row in rows] for end in ("low", "high"))
        axes.errorbar(
            [row[x] for row in rows], [row["score"] for row in rows], [low, high],
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
