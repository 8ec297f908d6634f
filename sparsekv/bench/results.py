"""Rows: what was measured, how it is judged, and the files it is written to."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from sparsekv.bench.case import Case, Round, Shape

MEASURED, MISSING, FAILED, NOT_RUN = "measured", "missing", "failed", "not run"
_TOO_FAST = 1.2  # of a ceiling: a peer beyond it has not done the work


@dataclass
class Row:
    """One contender of one case.

    value: median of all samples in `unit`; low, high: smallest and largest sample.
    tflops, tbs: what ours does per second (a peer: the same work in its time).
    roof: fraction of the measured ceiling. ratio: how many times better ours is than this peer.
    met: of ours, "yes", "no", "stretch" or "unknown: why". extra: other figures of the same run.
    about: of ours, its settings; then what the rounds had to say.
    """

    case: str
    group: str
    what: str
    shape: Shape
    contender: str
    status: str
    reason: str = ""
    unit: str = "ms"
    value: float | None = None
    low: float | None = None
    high: float | None = None
    samples: int = 0
    tflops: float | None = None
    tbs: float | None = None
    roof: float | None = None
    ratio: float | None = None
    target: str = ""
    met: str = ""
    extra: dict[str, float] = field(default_factory=dict)
    about: str = ""


def blank(case: Case, contender: str, status: str, reason: str = "") -> Row:
    """A row without figures."""
    wanted = case.target.text if case.target and contender == "ours" else ""
    return Row(
        case.name, case.group, case.what, dict(case.shape), contender, status, reason,
        unit=case.unit, target=wanted, about=case.about if contender == "ours" else "",
    )  # fmt: skip


def fill(
    row: Row, case: Case, rounds: Sequence[Round], ceilings: Mapping[str, float], on_gpu: bool
) -> None:
    """Put the figures of all rounds into a row.

    on_gpu: the ceilings bound what can be; those of a busy CPU and tiny tensors do not.
    """
    values = [value for one in rounds for value in one.values]
    row.status, row.value, row.samples = MEASURED, median(values), len(values)
    row.low, row.high = min(values), max(values)
    for one in rounds:
        row.extra |= one.extra
    notes = dict.fromkeys([row.about, *(one.note for one in rounds)])
    row.about = "; ".join(note for note in notes if note)
    if case.unit != "ms" or row.value <= 0:
        return
    if case.flops is not None:
        row.tflops = case.flops / row.value * 1e3 / 1e12
    if case.bytes is not None:
        row.tbs = case.bytes / row.value * 1e3 / 1e12
    reached = {"copy": row.tbs, "matmul": row.tflops}.get(case.roof or "")
    ceiling = ceilings.get({"copy": "copy_tbs", "matmul": "matmul_tflops"}.get(case.roof or "", ""))
    if reached is not None and ceiling:
        row.roof = reached / ceiling
        if on_gpu and row.roof > _TOO_FAST and not row.contender.startswith("ours"):
            reason = f"expected at most the machine's ceiling, got {row.roof:.0%} of it: no result?"
            row.status, row.reason, row.value = FAILED, reason, None


def judge(case: Case, rows: Sequence[Row], earlier: Mapping[str, Row], judged: bool) -> None:
    """Set the ratios of a case's rows, and whether ours meets its target.

    earlier: ours of the cases measured before, by name. judged: False for shapes that the target
    does not speak of. Metrics of a condition: "value", "tflops",
    "tbs", "roof", "share", "ratio.<contender>" and the names in `extra` of ours.
    """
    ours = next(row for row in rows if row.contender == "ours")
    metrics = dict(ours.extra)
    for name in ("value", "tflops", "tbs", "roof"):
        if getattr(ours, name) is not None:
            metrics[name] = getattr(ours, name)
    for row in rows:
        if row is not ours and ours.value and row.value:
            better = row.value / ours.value
            row.ratio = better if case.better == "low" else 1 / better
            metrics[f"ratio.{row.contender}"] = row.ratio
    base = earlier.get(case.versus or "")
    if base is not None and base.value and ours.value is not None:
        metrics["share"] = ours.extra["share"] = ours.value / base.value
    if case.target is None:
        return
    if not judged:
        ours.met = "not judged: tiny shapes"
    elif ours.status != MEASURED:
        ours.met = f"unknown: {ours.status}"
    else:
        ours.met = case.target.met(metrics)


def write(
    out: Path, machine: Mapping[str, Any], ceilings: Mapping[str, float], rows: Sequence[Row]
) -> None:
    """results.json and results.csv in `out`; a run that is killed leaves whole files."""
    record = {"machine": machine, "ceilings": ceilings, "rows": [asdict(row) for row in rows]}
    replace_file(out / "results.json", lambda file: json.dump(record, file, indent=1))

    def table(file: Any) -> None:
        names = [one.name for one in fields(Row)]
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for row in rows:
            plain = asdict(row)
            writer.writerow(plain | {name: json.dumps(plain[name]) for name in ("shape", "extra")})

    replace_file(out / "results.csv", table)


def replace_file(path: Path, fill_file: Callable[[Any], None]) -> None:
    """Write a whole text file, or leave the old one as it was."""
    part = path.with_suffix(path.suffix + ".part")
    with part.open("w", encoding="utf-8", newline="") as file:
        fill_file(file)
    os.replace(part, path)


@dataclass(frozen=True)
class Results:
    """A result file, read back."""

    machine: dict[str, Any]
    ceilings: dict[str, float]
    rows: list[Row]


def read(path: Path) -> Results:
    """A results.json, or the one in a folder. Raises ValueError if it is none."""
    file = path / "results.json" if path.is_dir() else path
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        rows = [Row(**row) for row in record["rows"]]
        return Results(record["machine"], record["ceilings"], rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"expected a results.json, got {str(path)!r}: {error}") from error
