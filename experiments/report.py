"""docs/results.md, and its first picture, from the committed results.

    python experiments/report.py

A run is a folder of experiments/results/ with run.json (command, commit, hardware, seed), tables
and pictures, as `run_all.py` leaves them; copy them there without `records/`. Every number of the
page is computed from these tables.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from outcome import ACCURACY, ALL, DENSE, Row, doubling, read_csv
from run_all import EXPERIMENTS

from sparsekv.plotting import pyplot

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "experiments" / "results", ROOT / "docs" / "results.md"
FRONTIER = "accuracy_vs_budget"
ENOUGH = 16  # contexts; a run with fewer shows that it works, not what is so
HEAD = """# Results

Written by `python experiments/report.py` from the tables in
[experiments/results](../experiments/results); change neither by hand.

Intervals are 95 %, bootstrapped over contexts. *question-aware*: the policy sees the question;
*question-agnostic*: the context is compressed before it. The two must not be mixed. Where arms are
compared, differences are paired, on the same contexts, and averaged over budgets and tasks: who is
*better* or *worse*, the interval says; *not told apart* is said where it covers 0. Of the accuracy
more is better, of the nll less.
"""


def page(results: Path, at: Path) -> str:
    """The Markdown. at: where it will lie, for the links."""
    runs = [folder for folder in sorted(results.iterdir()) if (folder / "run.json").exists()]
    parts = [HEAD]
    for run in reversed(runs):
        facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
        shown = [part for one in EXPERIMENTS for part in _experiment(one, run, at)]
        parts += [_facts(run.name, facts), *_frontier(run, at), *shown]
    return "\n".join(parts)


def _facts(name: str, facts: dict[str, Any]) -> str:
    """Where a run's numbers come from."""
    smoke = facts["samples"] < ENOUGH
    warning = "\n**A smoke run: it shows that all runs; too few contexts to conclude from.**\n"
    versions = f"torch {facts['torch']}, transformers {facts['transformers']}"
    return f"""## {name}
{warning if smoke else ""}
    {facts["command"]}

{facts["device"]}, {versions}, commit {facts["commit"]}, {facts["date"][:10]}; model
{facts["model"]}, {facts["samples"]} contexts a task, seed {facts["seed"]}.
"""


def _frontier(run: Path, at: Path) -> list[str]:
    """Picture and tables of accuracy against memory."""
    file = run / f"{FRONTIER}.csv"
    if not file.exists():
        return []
    rows = [row for row in read_csv(file) if row["task"] != ALL]
    parts = [
        "### Accuracy against memory\n",
        f"![accuracy against memory]({_link(run / 'frontier.png', at)})\n",
        "The line joins what nothing beats at its size. Mean over the tasks "
        f"{', '.join(dict.fromkeys(row['task'] for row in rows))}.\n",
    ]
    for task in dict.fromkeys(row["task"] for row in rows):
        for protocol in dict.fromkeys(row["protocol"] for row in rows):
            cell = [r for r in rows if (r["task"], r["protocol"]) == (task, protocol)]
            parts.append(_matrix(cell, f"{task}, {protocol}"))
    return parts


def _matrix(rows: Sequence[Row], title: str) -> str:
    """A line a policy, a column a budget."""
    budgets = sorted({row["budget"] for row in rows if row["arm"] != DENSE})
    dense = next((row for row in rows if row["arm"] == DENSE), None)
    best = {
        b: max((r["score"] or 0.0 for r in rows if r["budget"] == b), default=0) for b in budgets
    }
    metric = f", {dense['metric']}; dense {_interval(dense)}" if dense else ""
    lines = [f"**{title}**{metric}\n", f"| policy | {' | '.join(map(str, budgets))} |"]
    lines.append("|---" * (len(budgets) + 1) + "|")
    for arm in dict.fromkeys(row["arm"] for row in rows if row["arm"] != DENSE):
        cells = []
        for budget in budgets:
            row = next((r for r in rows if (r["arm"], r["budget"]) == (arm, budget)), None)
            text = _interval(row)
            cells.append(f"**{text}**" if row and row["score"] == best[budget] else text)
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _interval(row: Row | None) -> str:
    if row is None:
        return "not run"
    if row["score"] is None:
        return "refused"
    return f"{row['score']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"


def _experiment(experiment: Any, run: Path, at: Path) -> list[str]:
    """Question, picture and what the table says."""
    file = run / f"{experiment.name}.csv"
    if not file.exists():
        return []
    lines = [f"- {line}" for line in experiment.outcome(read_csv(file))]
    table = _link(file, at)
    script = _link(ROOT / "experiments" / f"{experiment.name}.py", at)
    return [
        f"### {experiment.question}\n",
        f"![{experiment.name}]({_link(file.with_suffix('.png'), at)})\n",
        "\n".join([*lines, ""]),
        f"[script]({script}) · [table]({table})\n",
    ]


def _link(file: Path, at: Path) -> str:
    return Path(os.path.relpath(file, at.parent)).as_posix()


def frontier(rows: Sequence[Row]) -> dict[str, dict[str, list[tuple[float, float, int]]]]:
    """By protocol and arm: (share of dense bytes, mean accuracy over tasks, budget), by share."""
    tasks = {row["task"] for row in rows if row["metric"] in ACCURACY}
    found: dict[str, dict[str, list[tuple[float, float, int]]]] = {}
    keys = dict.fromkeys((row["protocol"], row["arm"], row["budget"]) for row in rows)
    for protocol, arm, budget in keys:
        cell = [
            r for r in rows if (r["protocol"], r["arm"], r["budget"]) == (protocol, arm, budget)
        ]
        cell = [r for r in cell if r["task"] in tasks and r["score"] is not None]
        if len(cell) == len(tasks):
            share = float(np.mean([r["kv_bytes"] / r["dense_kv_bytes"] for r in cell]))
            score = float(np.mean([r["score"] for r in cell]))
            found.setdefault(protocol, {}).setdefault(arm, []).append((share, score, budget))
    return {p: {arm: sorted(line) for arm, line in arms.items()} for p, arms in found.items()}


def draw_frontier(rows: Sequence[Row], out: Path) -> None:
    """A panel a protocol; the black line joins the points that no smaller one reaches."""
    plt = pyplot("the plots")
    found = frontier(rows)
    figure, grid = plt.subplots(
        1, len(found), figsize=(5.2 * len(found) + 1.6, 4.2), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axes, (protocol, arms) in zip(grid.flat, found.items(), strict=True):
        for i, (arm, line) in enumerate(arms.items()):
            color = "black" if arm == DENSE else plt.cm.tab20(i % 20)
            x, y = [p[0] for p in line], [p[1] for p in line]
            axes.plot(x, y, marker="osv^D*"[i % 6], ms=4, lw=0.8, color=color, label=arm)
        points = sorted(point for line in arms.values() for point in line)
        best = [p for i, p in enumerate(points) if all(p[1] > q[1] for q in points[:i])]
        axes.step([p[0] for p in best], [p[1] for p in best], where="post", color="black", lw=1.6)
        axes.set(xlabel="KV bytes / dense", title=protocol)
        doubling(axes)
    grid[0, 0].set_ylabel("accuracy, mean over tasks")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    figure.savefig(out, dpi=90)
    plt.close(figure)


def main() -> None:
    """Write the page and its pictures."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    arguments.add_argument("--results", type=Path, default=RESULTS)
    arguments.add_argument("--page", type=Path, default=PAGE)
    given = arguments.parse_args()
    for file in given.results.glob(f"*/{FRONTIER}.csv"):
        draw_frontier(read_csv(file), file.parent / "frontier.png")
    given.page.write_text(page(given.results, given.page), encoding="utf-8")


if __name__ == "__main__":
    main()
