"""A run: every mode in a process of its own, or one server over HTTP; rows as they come."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsekv.bench.results import FAILED, NOT_RUN, Row
from sparsekv.bench.serve.http_engine import HttpEngine
from sparsekv.bench.serve.plan import Mode
from sparsekv.bench.serve.processes import Interpreter, follow
from sparsekv.bench.serve.record import Record, row_of
from sparsekv.bench.serve.session import Report, Session
from sparsekv.bench.serve.workload import Workload

_FOREVER = 10 * 365 * 86400.0  # seconds; JSON has no infinity


@dataclass(frozen=True)
class Settings:
    """How every mode is measured.

    seed: of prompts and arrivals. warmup: requests before each workload. timeout: seconds for one.
    seconds: of the whole run; no workload begins later. None: no limit.
    """

    seed: int = 0
    warmup: int = 4
    timeout: float = 600.0
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ValueError(f"expected --warmup >= 0, got {self.warmup}")
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"expected --timeout > 0 s, got {self.timeout}")


class Run:
    """Measures modes one after another. tell: called with each row, once it is on disk."""

    def __init__(self, record: Record, settings: Settings, tell: Callable[[Row], None]) -> None:
        self.record, self.settings, self.tell = record, settings, tell
        self.start = time.monotonic()

    def all(
        self, modes: Sequence[Mode], workloads: Sequence[Workload], interpreter: Interpreter,
        offline: bool,
    ) -> None:  # fmt: skip
        """Measure what the record does not have yet. offline: nothing is asked of the hub.

        Modes to come share what is left of the time equally, so that the first cannot use it up.
        """
        self.record.out.mkdir(parents=True, exist_ok=True)
        waiting = [(mode, self._missing(mode, workloads)) for mode in modes]
        waiting = [(mode, todo) for mode, todo in waiting if todo]
        for position, (mode, todo) in enumerate(waiting):
            share = self._left() / (len(waiting) - position)
            if share <= 0:
                self._report_all(mode, todo, NOT_RUN, "out of time")
            else:
                command = interpreter.command(plugins=mode.sparse, offline=offline)
                self._follow(mode, todo, command, share)

    def over_http(self, mode: Mode, workloads: Sequence[Workload], engine: HttpEngine) -> None:
        """Measure a server that is running already; of its steps nothing is known."""
        self.record.out.mkdir(parents=True, exist_ok=True)
        todo, deadline = self._missing(mode, workloads), time.monotonic() + self._left()
        settings = self.settings
        session = Session(engine, engine.vocab, settings.seed, settings.warmup, settings.timeout)

        async def measured() -> None:
            async with engine:
                await session.all(todo, lambda: time.monotonic() > deadline, put)

        def put(report: Report) -> None:
            self._put(mode, todo[report["workload"]], report, f"server {engine.base_url}")

        asyncio.run(measured())

    def _follow(
        self, mode: Mode, todo: Sequence[Workload], command: list[str], seconds: float
    ) -> None:
        """One worker. What it does not report has failed, with its last words as the reason."""
        settings = self.settings
        plan = {
            "engine": mode.engine, "sparse": mode.sparse, "seed": settings.seed,
            "workloads": [workload.plain() for workload in todo], "warmup": settings.warmup,
            "timeout": settings.timeout, "deadline": time.time() + seconds,
        }  # fmt: skip
        log = self.record.out / f"{log_name(mode)}.log"
        about, told, why = "", 0, ""
        with tempfile.TemporaryDirectory() as folder:
            try:
                for event in follow(command, plan, Path(folder), log):
                    if "ready" in event:
                        self.record.runs_on(event["ready"])
                        about = _about(event["ready"])
                    else:
                        self._put(mode, todo[event["workload"]], event, about)
                        told = event["workload"] + 1
            except RuntimeError as error:
                why = str(error)
        self._report_all(mode, todo[told:], FAILED, why or "the worker ended early")

    def _missing(self, mode: Mode, workloads: Sequence[Workload]) -> list[Workload]:
        return [workload for workload in workloads if not self.record.measured(mode, workload)]

    def _left(self) -> float:
        limit = self.settings.seconds
        return _FOREVER if limit is None else limit - (time.monotonic() - self.start)

    def _report_all(self, mode: Mode, todo: Sequence[Workload], status: str, why: str) -> None:
        for workload in todo:
            self._put(mode, workload, {"status": status, "reason": why, "figures": {}}, "")

    def _put(self, mode: Mode, workload: Workload, report: Report, about: str) -> None:
        self.record.machine["seconds"] = round(time.monotonic() - self.start, 1)
        text = f"commit {self.record.machine['commit']}; {about}".removesuffix("; ")
        self.tell(self.record.put(row_of(mode, workload, report, text)))


def log_name(mode: Mode) -> str:
    """What the log of a mode is called: "snapkv-1024-6"."""
    words = f"{mode.contender} {mode.kv_gib or 'unlimited'}"
    return "".join(c if c.isalnum() or c in "._" else "-" for c in words)


def _about(ready: dict[str, Any]) -> str:
    gib = (ready["blocks"] + 1) * ready["block_bytes"] / 2**30
    return (
        f"vLLM {ready['vllm']}, started in {ready['seconds']:.0f} s; {ready['blocks']} blocks of "
        f"{ready['block_size']} tokens, {gib:.2f} GiB; at most {ready['step_tokens']} tokens a step"
    )
