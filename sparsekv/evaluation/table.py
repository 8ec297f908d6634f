"""Lines as Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from sparsekv.evaluation.cells import Cell
from sparsekv.evaluation.lines import AVERAGE, Line, averages, lines
from sparsekv.evaluation.records import Key

MARKDOWN, CSV = "table.md", "table.csv"
_MIB = 1 << 20
_ABOUT = """\
Each policy beside a dense cache (`full`). `Δ dense` is the paired difference to it over the same
questions, in brackets the 95 % bootstrap interval over contexts. `kept` is tokens per layer and KV
head; `KV` is measured, `ratio` is to the bytes of a dense cache. ms are one item's share of its
batch: to read and compress its prompt, and to feed its question and answer.
"""
_AVERAGE = """\
Mean over the tasks that are no controls: em, acc, mc and scores as they are, NLL as the ratio of
perplexities exp(nll of dense - nll)."""


def write(
    cells: Mapping[Key, Cell], configs: Sequence[Mapping[str, Any]], folder: Path
) -> list[Path]:
    """Write both tables into `folder`; returns their paths."""
    every = [*averages(cells), *lines(cells)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKDOWN).write_text(markdown(every, configs), encoding="utf-8")
    (folder / CSV).write_text(as_csv(every), encoding="utf-8")
    return [folder / MARKDOWN, folder / CSV]


def as_csv(every: Iterable[Line]) -> str:
    """A column for each field of a line."""
    text = io.StringIO()
    names = [f.name for f in fields(Line)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(line) for line in every)
    return text.getvalue()


def markdown(every: Sequence[Line], configs: Sequence[Mapping[str, Any]] = ()) -> str:
    """A table for each protocol and task, averages first. configs: `run.json` of each folder."""
    parts = ["# Evaluation", "", *_origin(configs), _ABOUT]
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in every:
        groups.setdefault((line.task, line.protocol), []).append(line)
    for (task, protocol), group in groups.items():
        first = group[0]
        control = ", a control: it must not drop" if first.control else ""
        most = max(group, key=lambda line: line.items)
        count = f"{most.items} questions, {most.contexts} contexts"
        parts += [f"## {task}, {protocol}", "", f"{count}{control}.", ""]
        parts += [_AVERAGE, ""] if task == AVERAGE else []
        parts += [*_table(group), ""]
    return "\n".join(parts)


def _origin(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Model, seed and the commands with their commits."""
    if not configs:
        return []
    first = configs[0]
    found = [f"Model {first.get('model')}, {first.get('dtype')}, seed {first.get('seed')}.", ""]
    for config in configs:
        for part in config.get("history", ()):
            where = f"{part.get('commit')} on {part.get('device')}"
            found.append(f"    {part.get('command')}    # {where}, {part.get('date')}")
    return [*found, ""]


def _table(group: Sequence[Line]) -> list[str]:
    head = (
        "policy", "budget", group[0].metric, "Δ dense", "kept", "KV MiB", "ratio", "prefill ms",
        "decode ms", "note",
    )  # fmt: skip
    rows = [head, ("---",) * len(head), *(_row(line) for line in group)]
    return ["| " + " | ".join(str(c).replace("|", "\\|") for c in row) + " |" for row in rows]


def _row(line: Line) -> tuple[str, ...]:
    budget = "all" if line.budget is None else f"{line.budget}"
    if line.value is None:
        return (line.policy, budget, *[""] * 7, f"refused: {line.refused}")
    difference = ""
    if line.difference is not None:
        difference = f"{line.difference:+.3f}"
    if line.low is not None and line.high is not None:
        difference += f" [{line.low:+.3f}, {line.high:+.3f}]"
    held = None if line.kv_bytes is None else line.kv_bytes / _MIB
    return (
        line.policy, budget, f"{line.value:.3f}", difference, _shown(line.kept, ".0f"),
        _shown(held, ".2f"), _shown(line.ratio, ".3f"), _shown(line.prefill_ms, ".1f"),
        _shown(line.decode_ms, ".1f"), line.note,
    )  # fmt: skip


def _shown(value: float | None, how: str) -> str:
    """Empty for what is not known."""
    return "" if value is None else format(value, how)
