"""Run cases: contenders in turn, a row for each, files written after each case."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sparsekv.bench.case import Case, Context, Factory, Missing, Round
from sparsekv.bench.results import (
    FAILED,
    MISSING,
    NOT_RUN,
    Row,
    blank,
    fill,
    judge,
    write,
)
from sparsekv.bench.timing import ceilings, prepare

_OUT_OF_TIME = "out of time"
_REASON = 300  # characters kept of an error


@dataclass
class Run:
    """One run of a list of cases.

    context: how to measure. out: folder of the result files, which exists. machine: `describe()`.
    seconds: no case begins later than this after the start; None: no limit. tell: called with each
    row once its case is judged.
    """

    context: Context
    out: Path
    machine: dict[str, Any]
    seconds: float | None = None
    tell: Callable[[Row], None] = lambda row: None
    rows: list[Row] = field(default_factory=list)
    ceilings: dict[str, float] = field(default_factory=dict)

    def all(self, cases: Sequence[Case], before: Callable[[str], None]) -> list[Row]:
        """Measure the ceilings, then every case; `before` is called with what comes next."""
        start = time.monotonic()
        before("ceilings of this machine")
        self.ceilings = ceilings(self.context)
        for case in cases:
            before(case.name)
            late = self.seconds is not None and time.monotonic() - start > self.seconds
            rows = _not_run(case) if late else self._case(case)
            earlier = {row.case: row for row in self.rows if row.contender == "ours"}
            judge(case, rows, earlier, judged=not self.context.tiny)
            self.rows += rows
            self.machine["seconds"] = round(time.monotonic() - start, 1)
            write(self.out, self.machine, self.ceilings, self.rows)
            for row in rows:
                self.tell(row)
        return self.rows

    def _case(self, case: Case) -> list[Row]:
        try:
            inputs = case.inputs(self.context)
        except Exception as error:
            return [blank(case, name, FAILED, _reason(error)) for name in case.contenders]
        try:
            return _measure(case, inputs, self.context, self.ceilings)
        finally:
            del inputs
            _free(self.context)


def _not_run(case: Case) -> list[Row]:
    return [blank(case, name, NOT_RUN, _OUT_OF_TIME) for name in case.contenders]


def _measure(case: Case, inputs: Any, context: Context, limits: Mapping[str, float]) -> list[Row]:
    """A row for each contender, all measured in turn."""
    rows = {name: blank(case, name, MISSING) for name in case.contenders}
    ready: dict[str, Callable[[], Round]] = {}
    for name, factory in case.contenders.items():
        made = _try(rows[name], partial(_prepared, case, factory, inputs, context))
        if made is not None:
            ready[name] = made
        elif rows[name].status == FAILED:
            _free(context)
    found: dict[str, list[Round]] = {name: [] for name in ready}
    for _ in range(min(case.rounds or context.rounds, context.rounds)):
        for name in list(ready):
            one = _try(rows[name], ready[name])
            if one is None:
                del ready[name], found[name]
                _free(context)
            else:
                found[name].append(one)
    for name, rounds in found.items():
        fill(rows[name], case, rounds, limits, context.on_gpu)
    return list(rows.values())


def _prepared(case: Case, factory: Factory, inputs: Any, context: Context) -> Any:
    return prepare(case.measure, factory(inputs, context), context)


def _try(row: Row, action: Callable[[], Any]) -> Any:
    """What the action returns, or None with the row's status and reason set."""
    try:
        with torch.no_grad():
            return action()
    except Missing as error:
        row.status, row.reason = MISSING, str(error)
    except Exception as error:  # whatever a peer raises is a result, not the end of the run
        row.status, row.reason = FAILED, _reason(error)
    return None


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:_REASON]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _free(context: Context) -> None:
    """Give the device's memory back; on a CPU the collector takes longer than the cases."""
    if context.on_gpu:
        gc.collect()
        # After an illegal access nothing on the device works any more: every later row says so.
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
