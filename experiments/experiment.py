"""What an experiment is: arms on tasks, a table, a picture, a line of outcome; and its command.

A script has constants on top, `EXPERIMENT`, and at the bottom a call of `main`.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from outcome import (
    DENSE,
    Comparison,
    Row,
    by_context,
    columns,
    compared,
    differences,
    overall,
    plot_panels,
    read_csv,
    summary,
    write_csv,
)
from units import Arm, Options, Session, Unit, begin, cell_unit, do, groups, options_of, parser

from sparsekv.bench.machine import describe
from sparsekv.evaluation.records import PROTOCOLS
from sparsekv.models import PACKAGE, resolve_device

FULL = Arm(DENSE, "full", 1)


class Runnable(Protocol):
    """What the drivers ask of an experiment."""

    name: str
    question: str

    def units(self, options: Options) -> list[Unit]:
        """Everything that has to be run."""

    def rows(self, options: Options) -> list[Row]:
        """The table of the units that are done."""

    def plot(self, rows: Sequence[Row], out: Path) -> None:
        """The picture of the table."""

    def outcome(self, rows: Sequence[Row]) -> list[str]:
        """Lines computed from the table."""


@dataclass(frozen=True)
class Experiment:
    """Arms on tasks under protocols, each compared with the dense cache and with another arm.

    against: which label each label is compared with, at the same budget and cache dtype. x: the
    plot's axis, "kept" (tokens a head) or "kv_bytes".
    """

    name: str
    question: str
    arms: tuple[Arm, ...]
    tasks: tuple[str, ...]
    against: Mapping[str, str]
    protocols: tuple[str, ...] = PROTOCOLS
    x: str = "kept"

    def unit(self, options: Options, arm: Arm, task: str, protocol: str) -> Unit:
        """The work of a cell."""
        return cell_unit(options, arm, task, protocol)

    def records(self, options: Options, arm: Arm, task: str, protocol: str) -> list[Row] | None:
        """What a cell found; None: not done."""
        return self.unit(options, arm, task, protocol).records(options)

    @property
    def cells(self) -> list[tuple[str, str]]:
        """(task, protocol); language modelling has no question to know, so it stands under one."""
        return [
            (task, protocol)
            for task in self.tasks
            for protocol in self.protocols
            if not (task.startswith("lm-") and protocol == PROTOCOLS[0])
        ]

    def units(self, options: Options) -> list[Unit]:
        """The dense cache first."""
        arms = (FULL, *self.arms)
        return [self.unit(options, arm, *cell) for arm in arms for cell in self.cells]

    def rows(self, options: Options) -> list[Row]:
        """A row a cell: score, differences, what is kept; then one a comparison, over all cells."""
        rows: list[Row] = []
        gaps: dict[Comparison, dict[str, list[dict[str, float]]]] = {}
        for task, protocol in self.cells:
            scores = {}
            for arm in (FULL, *self.arms):
                records = self.records(options, arm, task, protocol)
                if records is None:
                    continue
                scores[arm] = by_context(records), summary(records)
            for arm, (mine, facts) in scores.items():
                other = self._peer(arm, list(scores))
                gap = differences(mine, scores[other][0]) if other else {}
                to_dense = differences(mine, scores[FULL][0]) if FULL in scores else {}
                row: Row = {"arm": arm.label, "budget": arm.budget, "kv_dtype": arm.kv_dtype}
                row |= {"task": task, "protocol": protocol, **facts}
                row |= columns("to_dense", list(to_dense.values()))
                row |= {"other": other and other.label} | columns("to_other", list(gap.values()))
                rows.append(row)
                if other and gap:
                    kind = Comparison(arm.label, other.label, protocol, facts["metric"] == "nll")
                    gaps.setdefault(kind, {}).setdefault(task, []).append(gap)
        return rows + [overall(comparison, by_task) for comparison, by_task in gaps.items()]

    def _peer(self, arm: Arm, done: Sequence[Arm]) -> Arm | None:
        """The arm that this one is compared with."""
        label = self.against.get(arm.label)
        for other in done:
            if other.label == label and other.budget == arm.budget:
                return other
        return None

    def plot(self, rows: Sequence[Row], out: Path) -> None:
        """A panel a task and protocol: score against what is kept."""
        plot_panels(rows, self.x, self.question, out)

    def outcome(self, rows: Sequence[Row]) -> list[str]:
        """A line for each comparison."""
        return compared(rows)


def summarise(experiment: Runnable, options: Options) -> None:
    """OUT/NAME.csv and OUT/NAME.png of what is done. Without matplotlib the picture is left out;
    `report.py` draws it from the table."""
    rows = experiment.rows(options)
    if not rows:
        return
    write_csv(rows, options.out / f"{experiment.name}.csv")
    try:
        experiment.plot(rows, options.out / f"{experiment.name}.png")
    except ValueError as error:
        print(f"{experiment.name}: no picture: {error}", file=sys.stderr)


def write_run(options: Options, seconds: float) -> None:
    """OUT/run.json: command, commit, hardware, versions, seed."""
    facts = describe(torch.device(resolve_device(options.device)), options.commit)
    facts |= {"command": shlex.join(["python", *sys.argv]), "seconds": round(seconds)}
    facts |= {"model": options.model or PACKAGE, "seed": options.seed, "samples": options.samples}
    (options.out / "run.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def main(experiment: Runnable, description: str | None) -> None:
    """Run one experiment in this process, then print its outcome."""
    options = options_of(parser(description).parse_args())
    begin(options)
    started = time.monotonic()
    todo = groups(experiment.units(options), options)
    session = Session(options) if todo else None
    for i, group in enumerate(todo, 1):
        assert session is not None
        do(session, group)
        seconds = time.monotonic() - started
        print(f"[{i}/{len(todo)}] {seconds:.0f} s {group[-1].key}", file=sys.stderr)
    summarise(experiment, options)
    write_run(options, time.monotonic() - started)
    print(experiment.question)
    for line in experiment.outcome(read_csv(options.out / f"{experiment.name}.csv")):
        print(f"- {line}")
