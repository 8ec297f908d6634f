"""Records of one or several folders as cells: all questions of a task under one setting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparsekv.evaluation.intervals import Sums
from sparsekv.evaluation.records import Key, Record
from sparsekv.evaluation.results import read_config, read_records

# What folders must agree on to be compared.
_PAIRED = ("model", "seed", "samples", "data", "dtype", "feed")


class Item(NamedTuple):
    """The figures of one question; see `Record`."""

    value: float
    kept: float
    kv_bytes: float
    dense_kv_bytes: float
    prefill_ms: float
    decode_ms: float


@dataclass
class Cell:
    """A task under a policy, a budget and a protocol; refused, or items by (example, question).

    measured: what all records of a cell must agree on, besides what names it.
    """

    task: str
    policy: str
    budget: int | float | None
    protocol: str
    headline: str = ""
    control: bool = False
    refused: str | None = None
    measured: tuple[Any, ...] | None = None
    notes: set[str] = field(default_factory=set)
    items: dict[tuple[str, str], Item] = field(default_factory=dict)

    def mean(self, name: str) -> float:
        """Of a figure of the items."""
        return float(self._table[:, Item._fields.index(name)].mean())

    @cached_property
    def _table(self) -> np.ndarray:
        """The figures of all items, float [items, figures]; made when no item is added any more."""
        return np.array(list(self.items.values()), dtype=float)

    def sums(self, keys: Iterable[tuple[str, str]]) -> Sums:
        """Values of the items `keys` by context, contexts in the order of their names."""
        totals: dict[str, list[float]] = {}
        for key in keys:
            totals.setdefault(key[0], []).append(self.items[key].value)
        ordered = [totals[name] for name in sorted(totals)]
        return Sums(np.array([sum(x) for x in ordered]), np.array([len(x) for x in ordered]))


def collect(records: Iterable[Record]) -> dict[Key, Cell]:
    """Cells by `Record.cell`. A record that is there twice counts once, the first.

    Raises:
        ValueError: a record without a value, or records of a cell that were measured in two ways.
    """
    cells: dict[Key, Cell] = {}
    for record in records:
        if record.cell not in cells:
            cells[record.cell] = Cell(
                record.task, record.policy, record.budget, record.protocol, record.headline,
                record.control,
            )  # fmt: skip
        cell = cells[record.cell]
        if record.refused is not None:
            cell.refused = record.refused
            continue
        value = record.value
        if value is None:
            raise ValueError(f"expected a value of {record.headline!r} in {record.key}, got none")
        _agree(cell, record)
        figures = (record.kept, record.kv_bytes, record.dense_kv_bytes)
        item = Item(value, *figures, record.prefill_ms, record.decode_ms)
        cell.items.setdefault((record.example, record.question), item)
        if record.note is not None:
            cell.notes.add(record.note)
    return cells


def _agree(cell: Cell, record: Record) -> None:
    """Raise ValueError for a record that its cell's others may not be averaged with."""
    # 1 and 1.0, one slot and everything, are equal as numbers.
    own = (type(record.budget).__name__, record.feed, record.settings)
    cell.measured = cell.measured or own
    if cell.measured != own:
        raise ValueError(
            f"expected records of {cell.policy} on {cell.task} of one kind of budget, one feed and "
            f"one setting, {cell.measured}, got {own}"
        )


def common(cells: Mapping[Key, Cell]) -> dict[Key, Cell]:
    """The cells of each task cut to the questions that all of them have answered.

    Of a run that was stopped, every setting is then measured on the same questions. Refusals stay.

    Raises:
        ValueError: a task without such a question.
    """
    shared: dict[str, set[tuple[str, str]]] = {}
    for cell in cells.values():
        if cell.refused is None:
            shared[cell.task] = shared.get(cell.task, set(cell.items)) & set(cell.items)
    for task, keys in shared.items():
        if not keys:
            raise ValueError(
                f"expected a question of {task} that every setting has answered, got none: "
                "resume its run, or leave its folder out"
            )
    return {
        key: replace(
            cell, items={k: v for k, v in cell.items.items() if k in shared.get(cell.task, ())}
        )
        for key, cell in cells.items()
    }


def merged(folders: Sequence[Path]) -> tuple[dict[Key, Cell], list[Mapping[str, Any]]]:
    """The cells of several folders together, and their configurations.

    Raises:
        ValueError: folders whose items are not the same, and so cannot be paired.
    """
    configs = [read_config(folder) for folder in folders]
    # Every two: folders that share no task with the first may share one with each other.
    pairs = combinations(zip(folders, configs, strict=True), 2)
    for ((first, one), (folder, other)), name in product(pairs, _PAIRED):
        if _differ(one.get(name), other.get(name)):
            raise ValueError(
                f"expected folders of one {name}, {one.get(name)!r} in {first}, "
                f"got {other.get(name)!r} in {folder}"
            )
    records = (record for folder in folders for record in read_records(folder))
    return collect(records), list(configs)


def _differ(one: Any, other: Any) -> bool:
    """Dicts where both have a key, other values as they are."""
    if isinstance(one, dict) and isinstance(other, dict):
        return any(one[key] != other[key] for key in one.keys() & other.keys())
    return bool(one != other)
