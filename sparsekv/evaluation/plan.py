"""What is to be run on one task, and what is left of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from sparsekv.evaluation.batches import Asked
from sparsekv.evaluation.example import Task
from sparsekv.evaluation.protocols import Subject
from sparsekv.evaluation.records import PROTOCOLS, Key
from sparsekv.evaluation.settings import Setting
from sparsekv.policies import Full

AWARE, AGNOSTIC = PROTOCOLS


@dataclass
class Plan:
    """Settings and protocols for a subject's task.

    done: keys of records that exist. refused: cells that a policy has refused; it grows.
    model, seed: what records say.
    """

    subject: Subject
    settings: Sequence[Setting]
    protocols: Sequence[str]
    batch_tokens: int
    done: Collection[Key] = ()
    refused: set[Key] = field(default_factory=set)
    model: str = ""
    seed: int = 0

    @property
    def task(self) -> Task:
        """The task."""
        return self.subject.task

    @property
    def vocabulary(self) -> int:
        """Logits of one token."""
        return int(self.subject.model.config.vocab_size)

    def cell(self, setting: Setting, protocol: str) -> Key:
        """See `Record.cell`."""
        return self.task.name, setting.policy.name, setting.budget, protocol

    def served(self, setting: Setting, aware: bool) -> list[str]:
        """The protocols that a run answers for which compresses prompts with, or without, their
        questions. A dense cache and questions of one token give the same under both."""
        same = isinstance(setting.policy, Full) or self.subject.has_only_short_questions
        if same:
            return [] if aware else list(self.protocols)
        return [name for name in self.protocols if name == (AWARE if aware else AGNOSTIC)]

    def due(self, setting: Setting, aware: bool, asked: Sequence[Asked]) -> list[str]:
        """Of the protocols served those that lack a record of one of `asked`."""
        found = []
        for protocol in self.served(setting, aware):
            cell = self.cell(setting, protocol)
            keys = ((*cell, a.example.id, a.question.id) for a in asked)
            if cell not in self.refused and any(key not in self.done for key in keys):
                found.append(protocol)
        return found
