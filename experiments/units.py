"""Units of work that resume, and the session that does them.

A unit is one arm (a policy, its budget, the dtype of the cache) on one task under one protocol. Its
records are one file under OUT/records, written whole: a run that is killed loses the unit that it
was in and nothing else, and experiments that need the same unit share it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from outcome import Row
from transformers.utils import logging

from sparsekv import calibrate_duo
from sparsekv.evaluation.example import Request, Task
from sparsekv.evaluation.plan import Plan
from sparsekv.evaluation.protocols import Subject
from sparsekv.evaluation.records import PROTOCOLS
from sparsekv.evaluation.runner import run
from sparsekv.evaluation.session import fingerprint
from sparsekv.evaluation.settings import admit
from sparsekv.evaluation.tasks import TASKS
from sparsekv.models import load, resolve_device
from sparsekv.policies import Duo, Full, Policy, get_policy

# Questions asked of one context: intervals are over contexts, so more contexts say more.
QUESTIONS = 4
# Tokens of one forward, by the kind of device: processes share a GPU's memory.
BATCH_TOKENS = {"cuda": 32768, "cpu": 8192}
# Of every book, the characters that the gates of duo are measured on.
_GATE_TEXT = slice(10_000, 18_000)


@dataclass(frozen=True)
class Options:
    """What the command line says. samples: contexts a task."""

    data: Path
    out: Path
    device: str = "auto"
    dtype: str = "auto"
    model: str | None = None
    samples: int = 32
    seed: int = 0
    commit: str | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether sizes may be those of a GPU."""
        return resolve_device(self.device).startswith("cuda")


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every script takes."""
    given = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    given.add_argument("--data", type=Path, required=True, help="folder with prose/*.txt and more")
    given.add_argument("--out", type=Path, required=True, help="folder for results; resumed")
    given.add_argument("--device", default="auto", help="auto, cpu, cuda")
    given.add_argument("--dtype", default="auto", help="auto, float32, bfloat16")
    given.add_argument("--model", help="Hugging Face id or folder; without it, SmolLM2-135M")
    given.add_argument("--samples", type=int, default=Options.samples, help="contexts a task")
    given.add_argument("--seed", type=int, default=Options.seed)
    given.add_argument("--commit", help="what to note where the code has no git history")
    return given


def options_of(given: argparse.Namespace) -> Options:
    """The options among parsed arguments."""
    return Options(**{field.name: getattr(given, field.name) for field in fields(Options)})


def begin(options: Options) -> None:
    """Make OUT. Of an OUT that is resumed the data and the kind of device must be the same: the
    names of units do not say them, and --dtype auto depends on the device."""
    options.out.mkdir(parents=True, exist_ok=True)
    kind = resolve_device(options.device).split(":")[0]
    facts, file = {"data": fingerprint(options.data), "device": kind}, options.out / "begun.json"
    if not file.exists():
        file.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    before = json.loads(file.read_text(encoding="utf-8"))
    if before != facts:
        sys.exit(f"error: expected what {options.out} was begun with, {before}, got {facts}")


def gates_file(options: Options) -> Path:
    """Where the gates of duo are kept."""
    return options.out / "duo.json"


class Session:
    """A loaded model, and the tasks built for its tokenizer."""

    def __init__(self, options: Options) -> None:
        self.options = options
        logging.disable_progress_bar()  # one of a second a process would cut through ours
        self.model, self.tokenizer = load(options.model, options.device, options.dtype)
        self._tasks: dict[str, Task] = {}

    def task(self, name: str) -> Task:
        """The task, with at most `QUESTIONS` questions a context; of choices, all."""
        if name not in self._tasks:
            task = TASKS[name](self.request())
            if task.kind != "choice":
                few = (replace(e, questions=e.questions[:QUESTIONS]) for e in task.examples)
                task = replace(task, examples=tuple(few))
            self._tasks[name] = task
        return self._tasks[name]

    def request(self) -> Request:
        """What a builder of tasks asks for."""
        options = self.options
        return Request(self.tokenizer, options.data, options.samples, options.seed)

    def ready(self, policy: Policy) -> Policy:
        """With a tokenizer if it wants one, and `duo` with gates: measured on the data once, kept
        in OUT/duo.json."""
        if not isinstance(policy, Duo) or policy.gates is not None:
            return policy.with_tokenizer(self.tokenizer)
        file = gates_file(self.options)
        if not file.exists():
            books = sorted((self.options.data / "prose").glob("*.txt"))
            texts = [book.read_text(encoding="utf-8")[_GATE_TEXT] for book in books]
            gates = calibrate_duo(self.model, texts, tokenizer=self.tokenizer)
            draft = file.with_suffix(f".{os.getpid()}")
            gates.save(draft)
            draft.replace(file)
        return Duo.load(file)


@dataclass(frozen=True)
class Arm:
    """label: the line of the plot, over its budgets."""

    label: str
    policy: str | Policy
    budget: int | float
    kv_dtype: str | None = None


@dataclass(frozen=True)
class Cell:
    """An arm's policy on a task under a protocol."""

    policy: Policy
    budget: int | float
    kv_dtype: str | None
    task: str
    protocol: str


@dataclass(frozen=True)
class Unit:
    """Work whose records are one file.

    key: its name, unique over all experiments. work: a cell, which is evaluated together with
    others of its policy, task and dtype since they read the same prompts, or something of its own.
    """

    key: str
    work: Cell | Callable[[Session], list[Row]]

    @property
    def group(self) -> Hashable:
        """What is done together."""
        cell = self.work
        return (cell.policy, cell.kv_dtype, cell.task) if isinstance(cell, Cell) else self.key

    def file(self, options: Options) -> Path:
        """Where its records stand once it is done."""
        return options.out / "records" / f"{self.key}.jsonl"

    def records(self, options: Options) -> list[Row] | None:
        """What it found; None: not done."""
        file = self.file(options)
        if not file.exists():
            return None
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

    def write(self, options: Options, rows: Sequence[Row]) -> None:
        """Whole or not at all."""
        file = self.file(options)
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        draft.replace(file)


def groups(units: Iterable[Unit], options: Options) -> list[list[Unit]]:
    """What is not done yet, in order, each unit once."""
    found: dict[Hashable, dict[str, Unit]] = {}
    for unit in units:
        if not unit.file(options).exists():
            found.setdefault(unit.group, {})[unit.key] = unit
    return [list(group.values()) for group in found.values()]


def do(session: Session, group: Sequence[Unit]) -> None:
    """Run a group and write its records; a refusal is a record, too."""
    first = group[0].work
    if isinstance(first, Cell):
        cells = {unit: unit.work for unit in group if isinstance(unit.work, Cell)}
        found = _evaluated(session, list(cells.values()))
        for unit, cell in cells.items():
            unit.write(session.options, found[cell])
    else:
        group[0].write(session.options, first(session))


def _evaluated(session: Session, cells: Sequence[Cell]) -> dict[Cell, list[Row]]:
    """Cells of one policy, task and cache dtype: prompts are read once for all of them."""
    model, one = session.model, cells[0]
    policy = session.ready(one.policy)
    budgets = list(dict.fromkeys(cell.budget for cell in cells))
    protocols = [name for name in PROTOCOLS if any(cell.protocol == name for cell in cells)]
    try:
        settings = admit(model, policy, budgets, kv_dtype=one.kv_dtype)
    except ValueError as error:
        return {cell: [{"refused": str(error)}] for cell in cells}
    subject = Subject(model, session.tokenizer, session.task(one.task))
    plan = Plan(subject, settings, protocols, BATCH_TOKENS[model.device.type])
    rows: dict[tuple[Any, str], list[Row]] = {}
    for record in (record for records in run(plan) for record in records):
        rows.setdefault((record.budget, record.protocol), []).append(record.to_dict())
    return {
        cell: rows[None if isinstance(policy, Full) else cell.budget, cell.protocol]
        for cell in cells
    }


def key_of(options: Options, *settings: object) -> str:
    """A short name for settings, the model and its dtype among them."""
    return hashlib.sha1(repr((settings, options.model, options.dtype)).encode()).hexdigest()[:10]


def cell_unit(options: Options, arm: Arm, task: str, protocol: str) -> Unit:
    """The unit of an arm on a task."""
    cell = Cell(get_policy(arm.policy), arm.budget, arm.kv_dtype, task, protocol)
    asked = f"{task}.{protocol}.n{options.samples}.s{options.seed}"
    settings = key_of(options, cell.policy, arm.kv_dtype, QUESTIONS)
    return Unit(f"{asked}.{cell.policy.name}.{arm.budget}.{settings}", cell)
