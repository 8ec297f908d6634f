"""A whole evaluation: its tasks and settings are made first, then a folder of results is filled."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sparsekv
from sparsekv.diagnose import default_plan, write_plan
from sparsekv.evaluation.example import Request, Task
from sparsekv.evaluation.lookup import find_builder
from sparsekv.evaluation.plan import Plan
from sparsekv.evaluation.protocols import Subject
from sparsekv.evaluation.records import Key, Record
from sparsekv.evaluation.results import Results
from sparsekv.evaluation.runner import run
from sparsekv.evaluation.settings import Setting, admit
from sparsekv.evaluation.wish import Wish
from sparsekv.hf.check import known_positions
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


def too_long(tasks: Sequence[Task], model: Any) -> list[str]:
    """A line for each task with prompts and answers beyond the positions that the model knows."""
    most = known_positions(model)
    found = []
    for task in tasks:
        longest = max(
            len(example.context) + len(q.prompt) + max(map(len, q.answers or ((),)))
            for example in task.examples
            for q in example.questions
        )
        longest += task.max_new_tokens
        if most is not None and longest > most:
            found.append(
                f"{task.name} takes {longest} tokens, and the model knows {most} positions"
            )
    return found


def settings_of(
    wish: Wish, model: Any, tokenizer: Any, results: Results
) -> tuple[list[Setting], dict[str, str]]:
    """Settings of all policies that the model accepts, and why it refuses the others.

    The model is left with a dense patch, under which caches of all settings are served.

    Raises:
        ValueError: gates or a plan of the user's that the model refuses.
    """
    settings: list[Setting] = []
    refused: dict[str, str] = {}
    for name in wish.policies:
        try:
            policy = _policy(name, wish, model, tokenizer, results)
            settings += admit(model, policy, wish.budgets, wish.feed)
        except ValueError as error:
            if {Duo.name: wish.gates, Planned.name: wish.plan}.get(name) is not None:
                raise  # the file is another model's: no result, and --resume would keep it
            refused[name] = " ".join(str(error).split())
    sparsekv.patch(model, Full.name, 1)
    return settings, refused


def _policy(name: str, wish: Wish, model: Any, tokenizer: Any, results: Results) -> Policy:
    """duo has gates and planned a plan: from a file, or measured, and then kept beside the results
    for the parts of the run that follow, where they might come out with other last digits."""
    if name not in (Duo.name, Planned.name):
        return get_policy(name).with_tokenizer(tokenizer)
    kind, given = (Duo, wish.gates) if name == Duo.name else (Planned, wish.plan)
    kept = results.path.parent / f"{name}.json"
    if given is None and results.records and kept.exists():
        given = kept
    if given is not None:
        return kind.load(given)
    if kind is Planned:  # of texts that no task uses
        write_plan(default_plan(model, tokenizer), kept, {})
        return Planned.load(kept)
    duo = _measured(wish.data, model, tokenizer)
    duo.save(kept)
    return duo


def _measured(data: Path | None, model: Any, tokenizer: Any) -> Duo:
    """duo with gates measured on the beginning of each prose text of the data."""
    files = sorted(data.glob("prose/*.txt")) if data is not None else []
    if not files:
        raise ValueError("expected --gates, or prose in --data to measure gates on, got neither")
    most = min(_CALIBRATION, known_positions(model) or _CALIBRATION)
    starts = (file.read_text(encoding="utf-8")[: 8 * most] for file in files)
    texts = [tokenizer(text, return_tensors="pt").input_ids[:, :most] for text in starts]
    return sparsekv.calibrate_duo(model, texts)


def fingerprint(data: Path | None) -> str:
    """Of all files in a data folder, linked folders too, or "none"."""
    if data is None:
        return "none"
    digest = hashlib.sha256()
    folders = os.walk(data, followlinks=True)
    files = (Path(folder, name) for folder, _, names in folders for name in names)
    for file in sorted(path for path in files if path.is_file()):
        digest.update(file.relative_to(data).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def config_of(
    wish: Wish, tasks: Sequence[Task], more: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    """What results must keep to when they go on. about: machine, commit and command, noted only."""
    names = ("command", "commit", "device", "torch", "date", "batch_tokens")
    noted = {name: about[name] for name in names}
    return {
        **more, "seed": wish.seed, "feed": wish.feed, "data": fingerprint(wish.data),
        "samples": {task.name: len(task.examples) for task in tasks}, "history": [noted],
    }  # fmt: skip


@dataclass(frozen=True)
class Session:
    """Tasks and settings for one model. refused: policies that the model refuses, and why."""

    wish: Wish
    model: Any
    tokenizer: Any
    tasks: Sequence[Task]
    settings: Sequence[Setting]
    refused: Mapping[str, str]
    name: str

    @classmethod
    def begin(
        cls, wish: Wish, model: Any, tokenizer: Any, tasks: Sequence[Task], name: str,
        results: Results,
    ) -> Session:  # fmt: skip
        """name: of the model, for the records. results: that are to be filled."""
        settings, refused = settings_of(wish, model, tokenizer, results)
        return cls(wish, model, tokenizer, tasks, settings, refused, name)

    @property
    def total(self) -> int:
        """Records of a run without refusals."""
        questions = sum(len(e.questions) for task in self.tasks for e in task.examples)
        return questions * len(self.settings) * len(self.wish.protocols)

    def fill(self, results: Results, batch_tokens: int) -> Iterator[tuple[str, int]]:
        """Write what `results` lack; yields the task and a number of its records, as they come.

        Raises:
            ValueError: `results` of a policy with other fields, such as gates of another file.
        """
        self._check_same(results.records)
        done: set[Key] = {record.key for record in results.records}
        refused = {record.cell for record in results.records if record.refused is not None}
        results.add(record for record in self._refusals() if record.key not in done)
        for task in self.tasks:
            yield task.name, sum(key[0] == task.name for key in done)
            subject = Subject(self.model, self.tokenizer, task)
            plan = Plan(
                subject, self.settings, self.wish.protocols, batch_tokens, done, refused, self.name,
                self.wish.seed,
            )  # fmt: skip
            for records in run(plan):
                results.add(records)
                yield task.name, len(records)

    def _refusals(self) -> Iterator[Record]:
        """A record for each cell of policies that the model refuses."""
        for name, reason in self.refused.items():
            for task in self.tasks:
                for budget in self.wish.budgets:
                    for protocol in self.wish.protocols:
                        yield Record(
                            task.name, name, budget, protocol, self.wish.feed, model=self.name,
                            headline=task.headline, control=task.control, seed=self.wish.seed,
                            refused=reason,
                        )  # fmt: skip

    def _check_same(self, records: Sequence[Record]) -> None:
        """Raise ValueError for a record of an earlier part that was measured in another way."""
        changed = {setting.policy.name: setting.changed for setting in self.settings}
        budgets = {(x.policy.name, x.budget): x.budget for x in self.settings}
        for record in records:
            name, old = record.policy, record.budget
            if name in self.refused and record.refused is None:
                raise ValueError(
                    f"expected {name} to be accepted as in the run that is resumed, got: "
                    f"{self.refused[name]}"
                )
            if name in changed and record.settings != changed[name]:
                raise ValueError(
                    f"expected {name} as in the run that is resumed, {record.settings or 'plain'}, "
                    f"got {changed[name] or 'plain'}: give its --gates or --plan, or leave it out"
                )
            # 1 and 1.0, one slot and everything, are equal as numbers, and so as keys.
            new = budgets.get((name, old), old)
            if type(old) is not type(new):
                raise ValueError(f"expected the budget {old!r} of the run resumed, got {new!r}")
