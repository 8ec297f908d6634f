"""Policies beside one of them instead of a dense cache: paired differences at the same budget.

Two policies that differ from a dense cache by overlapping intervals may still differ from each
other for certain, since the questions that are hard are hard for both. So the difference is taken
question by question and its interval over contexts, as in `sparsekv.evaluation.lines`. A task that
is scored by NLL counts with exp(nll_dense - nll), there as here.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from sparsekv.evaluation.cells import Cell
from sparsekv.evaluation.intervals import interval
from sparsekv.evaluation.lines import AVERAGE, dense_of, score
from sparsekv.evaluation.records import Key
from sparsekv.policies import Full

_About = tuple[str, int | float, str, str]  # protocol, budget, policy, against


@dataclass(frozen=True)
class Difference:
    """score - other, the score of `against`, with its 95 % interval, None where a task has one
    context; ratio: of their KV bytes. tasks, contexts: how many."""

    task: str
    protocol: str
    budget: int | float
    policy: str
    against: str
    tasks: int
    contexts: int
    score: float
    other: float
    difference: float
    low: float | None
    high: float | None
    ratio: float

    @property
    def verdict(self) -> str:
        """better, worse, or open where the interval holds 0, or there is none."""
        if self.low is None or self.high is None:
            return "open"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "open"


@dataclass(frozen=True)
class _Both:
    """Draws of a policy's score and the other's on one task, the means of all, and bytes."""

    task: str
    contexts: int
    means: tuple[float, float]
    draws: np.ndarray
    ratio: float


def differences(cells: Mapping[Key, Cell], against: str) -> list[Difference]:
    """Of every policy to `against`: the average over tasks that both have first, then each task.

    Controls are left out of the averages. A cell without its dense one or that of `against` at the
    same budget has no line.

    Raises:
        ValueError: `against` was not run under any budget.
    """
    found = [cell for cell in cells.values() if cell.policy not in (Full.name, against)]
    if not any(c.policy == against and c.budget is not None for c in cells.values()):
        known = sorted({c.policy for c in cells.values() if c.budget is not None})
        raise ValueError(f"expected a policy of these results, {', '.join(known)}, got {against!r}")
    groups: dict[_About, list[tuple[Cell, _Both]]] = {}
    for cell in found:
        both = _both(cells, cell, against)
        if both is not None and cell.budget is not None:
            about = (cell.protocol, cell.budget, cell.policy, against)
            groups.setdefault(about, []).append((cell, both))
    lines = []
    for about, members in groups.items():
        counted = [both for cell, both in members if not cell.control]
        if counted:
            lines.append(_line(AVERAGE, about, counted))
        lines += [_line(both.task, about, [both]) for _, both in members]
    return sorted(lines, key=lambda line: (line.task != AVERAGE, line.protocol, line.task))


def write(lines: list[Difference], against: str, folder: Path) -> Path:
    """Write against-POLICY.csv into `folder`; returns its path."""
    path = folder / f"against-{against}.csv"
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        names = [*(f.name for f in fields(Difference)), "verdict"]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(_row, lines))
    return path


def _row(line: Difference) -> dict[str, Any]:
    """Its cells; sums differ in their last digits between machines, so those are not written."""
    row = asdict(line) | {"verdict": line.verdict}
    return {name: round(v, 6) if isinstance(v, float) else v for name, v in row.items()}


def _both(cells: Mapping[Key, Cell], cell: Cell, against: str) -> _Both | None:
    other = cells.get((cell.task, against, cell.budget, cell.protocol))
    dense = dense_of(cells, cell)
    if cell.refused is not None or other is None or other.refused is not None or dense is None:
        return None
    common = [key for key in cell.items if key in other.items and key in dense.items]
    if not common:
        return None
    one, two, base = (c.sums(common) for c in (cell, other, dense))
    own, held = (sum(c.items[key].kv_bytes for key in common) for c in (cell, other))
    ratio = own / held if held else float("nan")  # 0: of a server, which does not tell
    (a, drawn_a), (b, drawn_b) = (
        score(sums, base, cell.headline, cell.task) for sums in (one, two)
    )
    return _Both(cell.task, len(one.total), (a, b), drawn_a - drawn_b, ratio)


def _line(task: str, about: _About, members: list[_Both]) -> Difference:
    one, two = (float(np.mean([both.means[i] for both in members])) for i in (0, 1))
    low, high = interval(np.stack([both.draws for both in members]).mean(0))
    sure = all(both.contexts > 1 for both in members)
    contexts = sum(both.contexts for both in members)
    ratio = float(np.mean([both.ratio for both in members]))
    return Difference(
        task, *about, len(members), contexts, one, two, one - two,
        low if sure else None, high if sure else None, ratio,
    )  # fmt: skip
