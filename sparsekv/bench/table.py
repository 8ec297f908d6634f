"""Markdown tables of result files, written between two markers of a README."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from sparsekv.bench.policy_table import GROUP as POLICIES
from sparsekv.bench.policy_table import policy_table
from sparsekv.bench.results import MEASURED, Results, Row
from sparsekv.bench.serve.ratios import ratio_table
from sparsekv.bench.serve.record import GROUP as SERVE

BEGIN = "<!-- sparsekv bench table: begin -->"
END = "<!-- sparsekv bench table: end -->"
_MACHINE = (
    "device", "driver", "torch", "triton", "transformers", "vllm", "python", "commit", "date",
)  # fmt: skip
_ABSENT = "not installed"
_OWN_TABLES = {POLICIES: policy_table, SERVE: ratio_table}


def tables(results: Sequence[Results]) -> str:
    """One table for each `what`; of a case that several files measured, the last counts.

    Of serving, whose modes may be measured apart, the last of each mode.
    """
    chosen: dict[str, list[Row]] = {}
    for result in results:
        for name, rows in _by_case(result.rows).items():
            if rows[0].group == SERVE:
                chosen[name] = _merged(chosen.get(name, []), rows)
            elif name not in chosen or any(row.status == MEASURED for row in rows):
                chosen[name] = rows
    kinds: dict[str, list[list[Row]]] = {}
    for rows in chosen.values():
        kinds.setdefault(f"{rows[0].group}: {rows[0].what}", []).append(rows)
    parts = [_sources(results)]
    for kind, cases in kinds.items():
        make = _OWN_TABLES.get(cases[0][0].group, _table)
        parts.append(f"### {kind}\n\n{make(cases)}")
    # The policies' own table has the reasons.
    absent = _absent(row for rows in chosen.values() for row in rows if row.group != POLICIES)
    if absent:
        parts.append("### Not measured\n\n" + absent)
    return "\n\n".join(parts)


def put(readme: Path, text: str) -> None:
    """Replace what stands between the markers; a file that does not exist is made.

    Raises ValueError if the file has no markers.
    """
    block = f"{BEGIN}\n\n{text}\n\n{END}"
    if not readme.exists():
        readme.write_text(f"# Benchmarks\n\n{block}\n", encoding="utf-8")
        return
    old = readme.read_text(encoding="utf-8")
    if BEGIN not in old or END not in old:
        raise ValueError(f"expected {str(readme)!r} to have the lines {BEGIN!r} and {END!r}")
    before, rest = old.split(BEGIN, 1)
    readme.write_text(before + block + rest.split(END, 1)[1], encoding="utf-8")


def _by_case(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.case, []).append(row)
    return found


def _merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """A row a contender: the newest, unless an older one was measured and it was not."""
    found = {row.contender: row for row in old}
    for row in new:
        if row.contender not in found or row.status == MEASURED:
            found[row.contender] = row
    return list(found.values())


def _sources(results: Sequence[Results]) -> str:
    lines = []
    for result in results:
        about = ", ".join(
            f"{key} {result.machine[key]}"
            for key in _MACHINE
            if result.machine.get(key, _ABSENT) != _ABSENT
        )
        limits = ", ".join(f"{key} {value:.4g}" for key, value in result.ceilings.items())
        lines.append(
            f"- {about}" + (f"; ceilings measured in the same run: {limits}" if limits else "")
        )
    return "\n".join(lines)


def _table(cases: Sequence[Sequence[Row]]) -> str:
    """Columns: what, shape, ours, each peer, best peer / ours, roof, target, met,
    and what else our run gave.
    """
    peers = list(
        dict.fromkeys(r.contender for rows in cases for r in rows if r.contender != "ours")
    )
    head = ["what", "shape", "ours", *peers, "ratio", "roof", "target", "met", "also"]
    lines = [head, ["---"] * len(head)]
    for rows in cases:
        by_name = {row.contender: row for row in rows}
        ours = by_name["ours"]
        ratios = [r.ratio for r in rows if r.ratio is not None and "ours" not in r.contender]
        lines.append(
            [
                ours.what,
                " ".join(f"{key}={value}" for key, value in ours.shape.items()),
                shown(ours),
                *(shown(by_name[name]) if name in by_name else "" for name in peers),
                f"{min(ratios):.2f}×" if ratios else "",
                f"{ours.roof:.0%}" if ours.roof is not None else "",
                ours.target,
                ours.met,
                ", ".join(f"{key} {value:.4g}" for key, value in ours.extra.items()),
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shown(row: Row) -> str:
    """A row in one cell: "0.531 ms (1.20×)", or its status."""
    if row.value is None:
        return row.status
    small = row.unit == "ms" and row.value < 0.1
    number = f"{row.value:.4g}" if row.value < 10000 else f"{row.value:.0f}"
    value = f"{row.value * 1e3:.1f} µs" if small else f"{number} {row.unit}"
    return value if row.ratio is None else f"{value} ({row.ratio:.2f}×)"


def _absent(rows: Iterable[Row]) -> str:
    """Reasons, each with the contenders and the number of cases that it holds for."""
    counts: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row.status != MEASURED:
            key = (row.contender, row.status, row.reason)
            counts[key] = counts.get(key, 0) + 1
    return "\n".join(
        f"- {name}: {status} in {count} case{'s' if count > 1 else ''}: {reason}"
        for (name, status, reason), count in counts.items()
    )
