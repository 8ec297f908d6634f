"""Cells as lines of a table: the headline, its difference to dense, memory and time; and averages.

A difference to a dense cache is over the same questions of both, with the interval of
`sparsekv.evaluation.intervals`. The average of a policy, budget and protocol is over the tasks that
are no controls, each counted once:

    score = mean over tasks of    em, acc, mc or the task's own score as it is,
                                  exp(nll_dense - nll) where the headline is nll

so a task scored by NLL counts with its perplexity's ratio to dense, 1 for a dense cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsekv.evaluation.cells import Cell
from sparsekv.evaluation.intervals import Sums, interval
from sparsekv.evaluation.records import Key
from sparsekv.policies import Full

AVERAGE = "average"


@dataclass(frozen=True)
class Line:
    """One line. difference: to dense, with low and high of its 95 % interval; None where there is
    no dense cell, and the interval where a task has one context. items, contexts: how many; tasks:
    of an average. ratio: KV bytes to dense ones.
    """

    task: str
    protocol: str
    policy: str
    budget: int | float | None
    metric: str
    control: bool
    items: int = 0
    contexts: int = 0
    tasks: int = 1
    value: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    kept: float | None = None
    kv_bytes: float | None = None
    ratio: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    note: str = ""
    refused: str | None = None


@dataclass(frozen=True)
class _Pair:
    """A cell of `task` beside its dense one, over the items of both: means and draws."""

    task: str
    own: Sums
    dense: Sums

    def scores(self, metric: str) -> tuple[float, float, np.ndarray, np.ndarray]:
        """score and dense score of an average, and their draws."""
        own, own_draws = score(self.own, self.dense, metric, self.task)
        dense, dense_draws = score(self.dense, self.dense, metric, self.task)
        return own, dense, own_draws, dense_draws


def score(sums: Sums, dense: Sums, metric: str, task: str) -> tuple[float, np.ndarray]:
    """A score where more is better, as averages count it: of all contexts, and of each draw."""
    if metric != "nll":
        return sums.mean, sums.draws(task)
    return float(np.exp(dense.mean - sums.mean)), np.exp(dense.draws(task) - sums.draws(task))


def lines(cells: Mapping[Key, Cell]) -> list[Line]:
    """A line a cell: by task and protocol, dense first, then policies and budgets as they came."""
    order = {name: i for i, name in enumerate(dict.fromkeys(c.task for c in cells.values()))}
    policies = {name: i for i, name in enumerate(dict.fromkeys(c.policy for c in cells.values()))}

    def place(cell: Cell) -> tuple:
        dense, budget = cell.policy != Full.name, _size(cell.budget)
        return order[cell.task], cell.protocol, dense, policies[cell.policy], budget

    asked = _asked(cells)
    return [
        _line(cell, dense_of(cells, cell), asked[cell.task])
        for cell in sorted(cells.values(), key=place)
    ]


def averages(cells: Mapping[Key, Cell]) -> list[Line]:
    """A line for each policy, budget and protocol; one that refused a task says so."""
    groups: dict[tuple, list[Cell]] = {}
    for cell in cells.values():
        if not cell.control:
            groups.setdefault((cell.protocol, cell.policy, cell.budget), []).append(cell)

    def place(key: tuple) -> tuple:
        protocol, policy, budget = key
        return protocol, policy != Full.name, list(groups).index((protocol, policy, budget))

    asked = _asked(cells)
    found = [_average(cells, groups[key], asked) for key in sorted(groups, key=place)]
    return [line for line in found if line is not None]


def _asked(cells: Mapping[Key, Cell]) -> dict[str, int]:
    """By task, how many different questions any of its cells has answered."""
    found: dict[str, set[tuple[str, str]]] = {}
    for cell in cells.values():
        found.setdefault(cell.task, set()).update(cell.items)
    return {task: len(keys) for task, keys in found.items()}


def _line(cell: Cell, dense: Cell | None, asked: int) -> Line:
    about = (cell.task, cell.protocol, cell.policy, cell.budget, cell.headline, cell.control)
    if cell.refused is not None:
        return Line(*about, refused=cell.refused)
    sums = cell.sums(cell.items)
    difference = low = high = None
    pair = _pair(cell, dense)
    if pair is not None and cell.policy != Full.name:
        difference = pair.own.mean - pair.dense.mean
        if not pair.own.alone:
            low, high = interval(pair.own.draws() - pair.dense.draws())
    unfinished = f"{len(cell.items)} of {asked} questions" if len(cell.items) < asked else ""
    note = "; ".join(filter(None, (unfinished, _note(cell.notes))))
    return Line(
        *about, items=len(cell.items), contexts=len(sums.total), value=sums.mean,
        difference=difference, low=low, high=high, note=note, **_costs([cell]),
    )  # fmt: skip


def _average(cells: Mapping[Key, Cell], group: list[Cell], asked: Mapping[str, int]) -> Line | None:
    """None without dense cells. asked: see `_asked`."""
    done = [cell for cell in group if cell.refused is None]
    pairs = [(cell, _pair(cell, dense_of(cells, cell))) for cell in done]
    paired = [(cell, pair) for cell, pair in pairs if pair is not None]
    scores = [pair.scores(cell.headline) for cell, pair in paired]
    first = group[0]
    about = (AVERAGE, first.protocol, first.policy, first.budget, "score", False)
    refused = [cell.task for cell in group if cell.refused is not None]
    if not scores:
        return Line(*about, tasks=0, refused=group[0].refused) if refused else None
    value, dense = float(np.mean([s[0] for s in scores])), float(np.mean([s[1] for s in scores]))
    low, high = interval(np.stack([s[2] - s[3] for s in scores]).mean(0))
    plain = first.policy == Full.name
    sure = not plain and not any(pair.own.alone for _, pair in paired)
    done = [cell for cell, _ in paired]
    return Line(
        *about, items=sum(len(cell.items) for cell in done), tasks=len(scores), value=value,
        contexts=sum(len(cell.sums(cell.items).total) for cell in done),
        difference=None if plain else value - dense, low=low if sure else None,
        high=high if sure else None, note=_gaps(cells, done, refused, asked), **_costs(done),
    )  # fmt: skip


def _gaps(
    cells: Mapping[Key, Cell], done: list[Cell], refused: list[str], asked: Mapping[str, int]
) -> str:
    """What an average over `done` lacks that others of its protocol have."""
    own = done[0].protocol, {*refused, *(cell.task for cell in done)}
    others = [c.task for c in cells.values() if c.protocol == own[0] and not c.control]
    missing = [task for task in dict.fromkeys(others) if task not in own[1]]
    begun = [f"{c.task} ({len(c.items)} of {asked[c.task]} questions)" for c in done]
    begun = [text for c, text in zip(done, begun, strict=True) if len(c.items) < asked[c.task]]
    parts = (
        f"without {', '.join(refused)}, which it refused" if refused else "",
        f"without {', '.join(missing)}, which is not measured" if missing else "",
        f"unfinished: {', '.join(begun)}" if begun else "",
    )
    return "; ".join(filter(None, parts))


def _costs(cells: list[Cell]) -> dict[str, Any]:
    """Means over cells of the means over their items. Of a server nothing but a time is known."""
    names = ("kept", "kv_bytes", "prefill_ms", "decode_ms")
    found = {name: float(np.mean([cell.mean(name) for cell in cells])) for name in names}
    if not all(cell.mean("dense_kv_bytes") for cell in cells):
        return {"decode_ms": found["decode_ms"]}
    ratios = [cell.mean("kv_bytes") / cell.mean("dense_kv_bytes") for cell in cells]
    return found | {"ratio": float(np.mean(ratios))}


def dense_of(cells: Mapping[Key, Cell], cell: Cell) -> Cell | None:
    """The cell of a dense cache beside this one, if it was run."""
    return cells.get((cell.task, Full.name, None, cell.protocol))


def _pair(cell: Cell, dense: Cell | None) -> _Pair | None:
    if dense is None:
        return None
    common = [key for key in cell.items if key in dense.items]
    return _Pair(cell.task, cell.sums(common), dense.sums(common)) if common else None


def _note(notes: Iterable[str]) -> str:
    ordered = sorted(notes)
    more = f" (and {len(ordered) - 1} more like it)" if len(ordered) > 1 else ""
    return ordered[0] + more if ordered else ""


def _size(budget: int | float | None) -> float:
    return float("inf") if budget is None else float(budget)
