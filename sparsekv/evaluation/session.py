"""A whole evaluation: its tasks and settings are made first, then a folder of results is filled."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sparsekv
from sparsekv.diagnose import default_plan
from sparsekv.evaluation.example import Request, Task
from sparsekv.evaluation.lookup import find_builder
from sparsekv.evaluation.plan import Plan
from sparsekv.evaluation.protocols import Subject
from sparsekv.evaluation.records import Key, Record
from sparsekv.evaluation.results import Results
from sparsekv.evaluation.runner import run
from sparsekv.evaluation.settings import Setting, admit
from sparsekv.evaluation.wish import Wish
from sparsekv.policies import Duo, Full, Planned, Policy, get_policy

# Tokens of the texts that duo's gates are measured on.
_CALIBRATION = 4096


def build_tasks(wish: Wish, tokenizer: Any) -> list[Task]:
    """The tasks of a wish.

    Raises:
        ValueError: a task without the data that it is made of.
    """
    return [
        find_builder(name)(Request(tokenizer, wish.data, wish.contexts(name), wish.seed))
        for name in wish.tasks
    ]


def settings_of(wish: Wish, model: Any, tokenizer: Any) -> tuple[list[Setting], dict[str, str]]:
    """Settings of all policies that the model accepts, and why it refuses the others.

    The model is left with a dense patch, under which caches of all settings are served.
    """
    settings: list[Setting] = []
    refused: dict[str, str] = {}
    for name in wish.policies:
        try:
            policy = _policy(name, wish, model, tokenizer)
            settings += admit(model, policy, wish.budgets, wish.feed)
        except ValueError as error:
            refused[name] = " ".join(str(error).split())
    sparsekv.patch(model, Full.name, 1)
    return settings, refused


def _policy(name: str, wish: Wish, model: Any, tokenizer: Any) -> Policy:
    """duo gets gates from a file, or measured on the beginning of each prose text of the data;
    planned a plan from a file, or one made of texts that no task uses."""
    if name == Planned.name:
        plan = wish.plan
        return default_plan(model, tokenizer).policy() if plan is None else Planned.load(plan)
    if name != Duo.name:
        return get_policy(name).with_tokenizer(tokenizer)
    if wish.gates is not None:
        return Duo.load(wish.gates)
    files = sorted(wish.data.glob("prose/*.txt")) if wish.data is not None else []
    if not files:
        raise ValueError("expected --gates, or prose in --data to measure gates on, got neither")
    starts = (file.read_text(encoding="utf-8")[: 8 * _CALIBRATION] for file in files)
    texts = [tokenizer(text, return_tensors="pt").input_ids[:, :_CALIBRATION] for text in starts]
    return sparsekv.calibrate_duo(model, texts)


def refusals(wish: Wish, refused: dict[str, str], tasks: Sequence[Task]) -> list[Record]:
    """A record for each cell of policies that the model refuses."""
    return [
        Record(task.name, name, budget, protocol, wish.feed, headline=task.headline,
               control=task.control, refused=reason)
        for name, reason in refused.items()
        for task in tasks
        for budget in wish.budgets
        for protocol in wish.protocols
    ]  # fmt: skip


def fingerprint(data: Path | None) -> str:
    """Of all files in a data folder, or "none"."""
    if data is None:
        return "none"
    digest = hashlib.sha256()
    for file in sorted(path for path in data.rglob("*") if path.is_file()):
        digest.update(file.relative_to(data).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def evaluate_all(
    wish: Wish,
    subjects: Sequence[Subject],
    settings: Sequence[Setting],
    results: Results,
    batch_tokens: int,
    model: str,
) -> Iterator[tuple[str, int]]:
    """Fill `results`; yields, as it goes, the task and how many records were settled."""
    done: set[Key] = {record.key for record in results.records}
    refused = {record.cell for record in results.records if record.refused is not None}
    for subject in subjects:
        plan = Plan(
            subject, settings, wish.protocols, batch_tokens, done, refused, model, wish.seed
        )
        yield subject.task.name, sum(key[0] == subject.task.name for key in done)
        for records in run(plan):
            results.add(records)
            yield subject.task.name, len(records)
