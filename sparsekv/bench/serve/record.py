"""The rows of a run of the serving benchmark, on disk after each of them."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsekv.bench.results import MEASURED, Row, read, replace_file, write
from sparsekv.bench.serve import targets
from sparsekv.bench.serve.plan import Mode
from sparsekv.bench.serve.session import Report
from sparsekv.bench.serve.workload import Workload

GROUP = "serve"
FLAT = "serve.csv"
SETTINGS, UNKNOWN = "settings", "unknown"
_SHAPE = ("in", "out", "concurrency", "ramp", "rate", "requests", "kv_gib")


def row_of(mode: Mode, workload: Workload, report: Report, about: str) -> Row:
    """A report as a row: output tokens a second, everything else in `extra`."""
    figures = dict(report["figures"])
    value = figures.pop("out_tok_s", None)
    return Row(
        mode.case(workload), GROUP, workload.what, mode.shape(workload), mode.contender,
        report["status"], report["reason"], unit="tok/s", value=value, low=value, high=value,
        samples=int(value is not None), extra=figures, about=about,
    )  # fmt: skip


@dataclass
class Record:
    """Rows and where they are written: results.json, results.csv, and serve.csv, which has a column
    for each figure.

    machine: what the files say of the run; its "settings" are those that all rows share, its
    "device" is unknown until an engine has told.
    """

    out: Path
    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def resumed(cls, out: Path, machine: dict[str, Any]) -> Record:
        """Go on with the rows in `out`, if there are any.

        Raises ValueError if they were measured with other settings.
        """
        if not (out / "results.json").exists():
            return cls(out, machine)
        old = read(out)
        theirs, ours = old.machine.get(SETTINGS), machine[SETTINGS]
        if theirs != ours:
            raise ValueError(f"expected --resume with the settings {theirs}, got {ours}")
        return cls(out, machine | {"device": old.machine["device"]}, old.rows)

    def measured(self, mode: Mode, workload: Workload) -> bool:
        """Whether this has been measured without a failure."""
        case = mode.case(workload)
        return any(
            (row.case, row.contender, row.status) == (case, mode.contender, MEASURED)
            and not row.extra.get("failures")
            for row in self.rows
        )

    def runs_on(self, about: dict[str, Any]) -> None:
        """Note the machine of an engine. Raises ValueError if the rows come from another device."""
        old = self.machine["device"]
        if old not in (UNKNOWN, about["device"]):
            raise ValueError(f"expected --resume on {old}, got {about['device']}")
        self.machine |= {key: about[key] for key in ("device", "vllm")}

    def put(self, row: Row) -> Row:
        """Add a row, in place of an older one of the same case and contender, and write."""
        at = [(old.case, old.contender) for old in self.rows]
        if (row.case, row.contender) in at:
            self.rows[at.index((row.case, row.contender))] = row
        else:
            self.rows.append(row)
        judged = targets.DEVICE in self.machine["device"]
        judged = judged and self.machine[SETTINGS]["model"] == targets.MODEL
        targets.compare(self.rows, judged)
        write(self.out, self.machine, {}, self.rows)
        replace_file(self.out / FLAT, lambda file: _flat(file, self.rows))
        return row


def _flat(file: Any, rows: Iterable[Row]) -> None:
    lines = [
        {"contender": row.contender, "what": row.what, **row.shape, "status": row.status,
         "out_tok_s": row.value, **row.extra, "target": row.target, "met": row.met,
         "reason": row.reason, "about": row.about}
        for row in rows
    ]  # fmt: skip
    first = ["contender", "what", *_SHAPE, "status"]
    names = dict.fromkeys([*first, *(name for line in lines for name in line)])
    last = ("target", "met", "reason", "about")
    writer = csv.DictWriter(file, [*(n for n in names if n not in last), *last])
    writer.writeheader()
    writer.writerows(lines)
