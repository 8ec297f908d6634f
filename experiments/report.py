"""docs/results.md from the committed results.

    python experiments/report.py

A run is a folder of experiments/results/ with run.json: what `sparsekv eval` leaves (its table.csv
and frontier.png; results.jsonl is too large to commit), what `run_all.py` leaves (a table and a
picture an experiment, without records/), or what `served_needle.py` leaves (table.csv). Every
number of the page is computed from these tables.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outcome import ALL, DENSE, Row, read_csv, span
from run_all import EXPERIMENTS

from sparsekv.evaluation.lines import AVERAGE
from sparsekv.policies import Full

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "experiments" / "results", ROOT / "docs" / "results.md"
ENOUGH = 16  # contexts; a run with fewer shows that it works, not what is so
CURVES = "accuracy_vs_budget"
_TOP = 5
_SLACK = 1.1  # of the budget: official rounding and partial pages are no sin, full layers are
HEAD = """# Results

Written by `python experiments/report.py` from the tables in
[experiments/results](../experiments/results); change neither by hand.

*question-aware*: the policy sees the question. *question-agnostic*: the context is compressed
before it. The two must not be mixed. Intervals are 95 %, bootstrapped over contexts; differences
are paired, on the same contexts.
"""


def page(results: Path, at: Path) -> str:
    """The Markdown. at: where it will lie, for the links. The evaluation with most contexts comes
    first, experiments after all evaluations."""
    runs = [(json.loads(file.read_text()), file.parent) for file in results.glob("*/run.json")]
    runs.sort(key=lambda run: ("history" not in run[0], -contexts(run[0]), run[1].name))
    parts = [HEAD] if runs else [HEAD, "No run is committed yet.\n"]
    for facts, folder in runs:
        made = experiments if "served" not in facts else through_vllm
        made = evaluation if "history" in facts else made
        parts += made(facts, folder, lambda file: Path(os.path.relpath(file, at.parent)).as_posix())
    return "\n".join(parts)


def contexts(facts: dict[str, Any]) -> int:
    """Of all tasks of an evaluation; 0 of other runs."""
    return sum(facts["samples"].values()) if "history" in facts else 0


Link = Callable[[Path], str]


def evaluation(facts: dict[str, Any], folder: Path, link: Link) -> list[str]:
    """A run of `sparsekv eval`: the frontier, who is best, tables by policy and budget."""
    few = [task for task, count in facts["samples"].items() if count < ENOUGH]
    smoke = len(few) == len(facts["samples"])
    parts = [_title(folder, smoke)]
    for part in facts["history"]:
        where = f"{part['device']}, torch {part['torch']}, commit {part['commit']}, {part['date']}"
        parts.append(f"    {part['command']}\n\n{where}.\n")
    counts = ", ".join(f"{task} {count}" for task, count in facts["samples"].items())
    parts += [
        f"Model {facts['model']}, {facts['dtype']}, seed {facts['seed']}. Contexts: {counts}.\n",
        *([f"{facts['note']}\n"] if "note" in facts else []),
        *([f"Too few to conclude from alone: {', '.join(few)}.\n"] if few and not smoke else []),
        f"![accuracy against memory]({link(folder / 'frontier.png')})\n",
        "Score: the mean over all tasks but the control; a task scored by nll counts with its "
        "perplexity's ratio to dense. In brackets the interval of the difference to dense.\n",
    ]
    rows = read_csv(folder / "table.csv")
    for task in dict.fromkeys(row["task"] for row in rows):
        cells = [row for row in rows if row["task"] == task]
        tables = []
        for protocol in dict.fromkeys(row["protocol"] for row in cells):
            tables += _by_budget([r for r in cells if r["protocol"] == protocol], protocol)
        if task == AVERAGE:
            parts += [*_best(cells), *tables, *_against(folder)]
        else:
            parts += [f"<details><summary>{task}</summary>\n", *tables, "</details>\n"]
    return [*parts, f"[All figures, with bytes and times]({link(folder / 'table.md')})\n"]


def _best(rows: Sequence[Row]) -> list[str]:
    """A line for each protocol and budget: the best averages, of policies that were run on all
    tasks, and hold what the budget says."""
    lines = []
    rows = [r for r in rows if r["policy"] != Full.name and r["value"] is not None]
    most = max((row["tasks"] for row in rows), default=0)
    rows = [row for row in rows if row["tasks"] == most]
    for protocol, budget in dict.fromkeys((row["protocol"], row["budget"]) for row in rows):
        cell = [r for r in rows if (r["protocol"], r["budget"]) == (protocol, budget)]
        cell.sort(key=lambda row: -row["value"])
        fair = [row for row in cell if _holds(row) <= _SLACK]
        shown = [f"{r['policy']} {r['difference']:+.3f}{span(r, form='+.3f')}" for r in fair[:_TOP]]
        more = [f"{r['policy']} {_holds(r):.1f} times" for r in cell if _holds(r) > _SLACK]
        beside = f" (left out, since they hold more: {', '.join(more)} the budget)" if more else ""
        lines.append(f"- {protocol}, budget {budget}, minus dense: {' · '.join(shown)}{beside}")
    return [*lines, ""]


def _against(folder: Path) -> list[str]:
    """Tables of paired differences of the average score to one policy, for each such file."""
    parts = []
    for file in sorted(folder.glob("against-*.csv")):
        rows = [row for row in read_csv(file) if row["task"] == AVERAGE]
        other = file.stem.removeprefix("against-")
        parts.append(
            f"<details><summary>Paired differences to {other} at the same budget</summary>\n\n"
            "Over the tasks that both were run on. An interval without 0 is in bold; behind it, "
            "how many times as many bytes, if not as many.\n"
        )
        for protocol in dict.fromkeys(row["protocol"] for row in rows):
            mine = [row for row in rows if row["protocol"] == protocol]
            budgets = sorted({row["budget"] for row in mine})
            lines = [f"| {protocol} | {' | '.join(map(str, budgets))} |"]
            lines.append("|---" * (len(budgets) + 1) + "|")
            for policy in dict.fromkeys(row["policy"] for row in mine):
                by_budget = {r["budget"]: _difference(r) for r in mine if r["policy"] == policy}
                cells = [by_budget.get(budget, "not run") for budget in budgets]
                lines.append(f"| {policy} | {' | '.join(cells)} |")
            parts.append("\n".join([*lines, ""]))
        parts.append("</details>\n")
    return parts


def _difference(row: Row) -> str:
    text = f"{row['difference']:+.2f}{span(row, form='+.2f')}"
    text = text if row["verdict"] == "open" else f"**{text}**"
    return text if abs(row["ratio"] - 1) < _SLACK - 1 else f"{text} ({row['ratio']:.1f}×)"


def _holds(row: Row) -> float:
    """What is kept, to the budget."""
    share = row["ratio"] if isinstance(row["budget"], float) else row["kept"]
    return float(share / row["budget"])


def _by_budget(rows: Sequence[Row], protocol: str) -> list[str]:
    """A line a policy, a column a budget: value, and the interval of its difference to dense."""
    budgets = sorted({row["budget"] for row in rows if row["budget"] is not None})
    dense = next((row for row in rows if row["policy"] == Full.name), None)
    beside = f"; dense {dense['value']:.3f}" if dense else ""
    lines = [f"**{protocol}**, {rows[0]['metric']}{beside}\n"]
    lines += [f"| policy | {' | '.join(map(str, budgets))} |", "|---" * (len(budgets) + 1) + "|"]
    most = max(row["tasks"] for row in rows)
    for policy in dict.fromkeys(row["policy"] for row in rows if row["policy"] != Full.name):
        tasks = max(row["tasks"] for row in rows if row["policy"] == policy)
        only = f" ({tasks} of {most} tasks only)" if tasks < most else ""
        cells = []
        for budget in budgets:
            mine = [r for r in rows if (r["policy"], r["budget"]) == (policy, budget)]
            cells.append(_cell(mine[0], "value", "+.2f") if mine else "not run")
        lines.append(f"| {policy}{only} | {' | '.join(cells)} |")
    return ["\n".join([*lines, ""])]


def _cell(row: Row, name: str, form: str) -> str:
    return "refused" if row[name] is None else f"{row[name]:.2f}{span(row, form=form)}"


def experiments(facts: dict[str, Any], folder: Path, link: Link) -> list[str]:
    """A run of `run_all.py`, or of one experiment."""
    where = f"{facts['device']}, torch {facts['torch']}, transformers {facts['transformers']}"
    parts = [
        _title(folder, facts["samples"] < ENOUGH),
        f"    {facts['command']}\n\n{where}, commit {facts['commit']}, {facts['date']}.",
        f"Model {facts['model']}, seed {facts['seed']}, {facts['samples']} contexts a task.\n",
        "Where arms are compared, their differences are averaged over budgets and tasks: who is "
        "*better* or *worse*, the interval says; *not told apart* where it covers 0. More is "
        "better of accuracy, less of nll.\n",
    ]
    for experiment in EXPERIMENTS:
        table = folder / f"{experiment.name}.csv"
        if table.exists():
            parts += _experiment(experiment, table, link)
    return parts


def through_vllm(facts: dict[str, Any], folder: Path, link: Link) -> list[str]:
    """A run of `served_needle.py`."""
    device = facts["cpu"] if facts["device"] == "cpu" else facts["device"]
    where = f"{device}, {facts['threads']} of {facts['cores']} cores, torch {facts['torch']}, "
    where += facts["vllm"]
    commits = ", ".join(f"{mode} {of['commit']}" for mode, of in facts["served"].items())
    rows = read_csv(folder / "table.csv")
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = [f"| exact answers | {' | '.join(tasks)} |", "|---" * (len(tasks) + 1) + "|"]
    for mode in facts["served"]:
        mine = {row["task"]: row for row in rows if row["mode"] == mode}
        lines.append(f"| {mode} | {' | '.join(_served(mine[task]) for task in tasks)} |")
    return [
        _title(folder, facts["samples"] < ENOUGH),
        f"    {facts['command']}\n\n{where}, {facts['date']}. Commits: {commits}.\n",
        f"Through vLLM, question-aware, {facts['samples']} contexts a task. "
        f"Model {facts['model']}, seed {facts['seed']}. "
        "In brackets the interval of the difference to dense.\n",
        "\n".join(lines) + "\n",
        f"[script]({link(ROOT / 'experiments' / 'served_needle.py')}) · "
        f"[table]({link(folder / 'table.csv')})\n",
    ]


def _served(row: Row) -> str:
    beside = "" if row["mode"] == DENSE else span(row, "to_dense_", "+.2f")
    return f"{row['em']:.2f}{beside}"


def _experiment(experiment: Any, table: Path, link: Link) -> list[str]:
    """Question, picture and what the table says."""
    rows = read_csv(table)
    script = ROOT / "experiments" / f"{experiment.name}.py"
    parts = [
        f"### {experiment.question}\n",
        f"![{experiment.name}]({link(table.with_suffix('.png'))})\n",
        "\n".join(f"- {line}" for line in experiment.outcome(rows)) + "\n",
    ]
    if experiment.name == CURVES:
        parts += _curves([row for row in rows if row["task"] != ALL])
    return [*parts, f"[script]({link(script)}) · [table]({link(table)})\n"]


def _curves(rows: Sequence[Row]) -> list[str]:
    """A table for each task and protocol: a line a policy, a column a budget."""
    parts = []
    for task, protocol in dict.fromkeys((row["task"], row["protocol"]) for row in rows):
        cell = [r for r in rows if (r["task"], r["protocol"]) == (task, protocol)]
        arms = [row for row in cell if row["arm"] != DENSE]
        budgets = sorted({row["budget"] for row in arms})
        dense = [_cell(row, "score", ".2f") for row in cell if row["arm"] == DENSE]
        lines = [f"| dense {' '.join(dense)} | {' | '.join(map(str, budgets))} |"]
        lines.append("|---" * (len(budgets) + 1) + "|")
        for arm in dict.fromkeys(row["arm"] for row in arms):
            mine = {r["budget"]: _cell(r, "score", ".2f") for r in arms if r["arm"] == arm}
            lines.append(f"| {arm} | {' | '.join(mine.get(b, 'not run') for b in budgets)} |")
        title = f"<details><summary>{task}, {protocol}</summary>\n"
        parts += [title, "\n".join(lines) + "\n", "</details>\n"]
    return parts


def _title(folder: Path, smoke: bool) -> str:
    warning = "\n**A smoke run: it shows that all runs; too few contexts to conclude from.**\n"
    return f"## {folder.name}\n{warning if smoke else ''}"


def main() -> None:
    """Draw pictures that are missing, and write the page."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    arguments.add_argument("--results", type=Path, default=RESULTS)
    arguments.add_argument("--page", type=Path, default=PAGE)
    given = arguments.parse_args()
    for experiment in EXPERIMENTS:
        for table in given.results.glob(f"*/{experiment.name}.csv"):
            if not table.with_suffix(".png").exists():
                experiment.plot(read_csv(table), table.with_suffix(".png"))
    given.page.write_text(page(given.results, given.page), encoding="utf-8")


if __name__ == "__main__":
    main()
