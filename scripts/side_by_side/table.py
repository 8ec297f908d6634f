"""The table of docs/kvpress.md from kept.csv.

    python scripts/side_by_side/table.py KEPT.csv docs/kvpress.md

Everything between the two markers of the document is replaced.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import deviations
from cases import Case, cases

from sparsekv.policies import Policy

BEGIN, END = "<!-- side by side: begin -->", "<!-- side by side: end -->"
HEADER = (
    "| kvpress | sparsekv | same kept | same heads | with what differs put in | what differs |\n"
    "|---|---|---|---|---|---|"
)


def table(path: Path) -> str:
    """Markdown: a line for each case, with the least of its figures over the prompts."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = []
    shown = cases(int(rows[0]["tokens"]), int(rows[0]["budget"]))
    for case in shown:
        mine = [row for row in rows if row["case"] == case.name]
        if mine:
            lines.append(line(case, mine))
    return "\n".join([HEADER, *lines])


def line(case: Case, rows: list[dict[str, str]]) -> str:
    """One case: the least share over its rows, and the heads of all of them."""
    same, heads, total = least(rows, "share"), whole(rows, "heads"), 90 * len(rows)
    told = ""
    if case.told is not None:
        told = f"{least(rows, 'told_share')}, {whole(rows, 'told_heads')} heads"
    elif case.why:
        told = f"layer 0 alone: {least(rows, 'lowest')}"
    ours = f"`{words(case.policy)}`".replace(f"block={rows[0]['tokens']}", "block=T")
    if case.told is not None and type(case.told).__module__ != deviations.__name__:
        told += f"; `{difference(case.policy, case.told)}`"
    few = "" if case.budget is None else f", C = {case.budget}"
    cells = (
        f"`{press(case.press)}`{few}",
        ours,
        same,
        f"{heads} of {total}",
        told,
        why(case, rows),
    )
    return f"| {' | '.join(cells)} |"


def why(case: Case, rows: list[dict[str, str]]) -> str:
    """What differs; ties where nothing else does."""
    apart = [float(row["gap"]) for row in rows if row["gap"]]
    if not apart:
        return case.why or "nothing"
    ties = (
        f"scores that differ by at most {max(apart):.0e} of themselves" if max(apart)
        else "equal scores: the newest token stays here, any in kvpress"
    )  # fmt: skip
    return f"{case.why}; and {ties}" if case.why else ties


def least(rows: list[dict[str, str]], column: str) -> str:
    """The smallest number of a column; rounded down, so that only 1 is shown as 1."""
    value = min(float(row[column]) for row in rows)
    return "1" if value == 1 else f"{int(value * 1e4) / 1e4:.4f}"


def whole(rows: list[dict[str, str]], column: str) -> int:
    """The sum of a column of counts."""
    return sum(int(row[column]) for row in rows)


def words(policy: Policy) -> str:
    """A policy as it would be written, without the fields that have their defaults."""
    out = []
    plain: Mapping[str, Any] = vars(type(policy)())
    for field in fields(policy):
        value = getattr(policy, field.name)
        if field.name == "gates":
            out.append("gates")
        elif isinstance(value, Policy):
            out.append(words(value))
        elif value != plain[field.name]:
            out.append(f"{field.name}={value!r}")
    return f"{type(policy).__name__}({', '.join(out)})"


def difference(policy: Policy, told: Policy) -> str:
    """The fields that tell a policy what kvpress does, without their values."""
    names = [f.name for f in fields(told) if getattr(told, f.name) != getattr(policy, f.name)]
    return ", ".join(names) or "as it is"


def press(spec: Mapping[str, Any]) -> str:
    """A press as it would be written, without its compression ratio."""
    out = []
    for name, value in spec.items():
        if isinstance(value, Mapping):
            out.append(press(value))
        elif name not in ("class", "compression_ratio"):
            out.append(f"{name}={value!r}")
    return f"{spec['class']}({', '.join(out)})"


def updated(text: str, made: str) -> str:
    """The document with this table between its markers."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Command line."""
    results, document = map(Path, sys.argv[1:])
    document.write_text(updated(document.read_text(), table(results)))


if __name__ == "__main__":
    main()
