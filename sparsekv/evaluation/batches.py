"""Which contexts are read together, and which questions are answered together.

Decided by lengths alone, for a task as a whole: what is done already, or under which policies, does
not change it. So a resumed run repeats the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sparsekv.evaluation.example import Example, Question, Task

Item = TypeVar("Item")

# Keys that the rows of one forward may attend, for each token of a batch.
_KEYS = 16
# Logits that one forward may make, for each token of a batch.
_LOGITS = 4096


@dataclass(frozen=True)
class Asked:
    """A question about context number `place` of its batch."""

    place: int
    example: Example
    question: Question

    @property
    def prompt(self) -> tuple[int, ...]:
        """Context and question in one piece, but its last token."""
        return self.example.context + self.question.prompt[:-1]

    @property
    def answers(self) -> tuple[tuple[int, ...], ...]:
        """The answers that are fed; one empty one, if the model has to write its own."""
        return self.question.answers or ((),)


@dataclass(frozen=True)
class Batch:
    """Contexts that are read together, shortest first."""

    examples: tuple[Example, ...]

    @property
    def asked(self) -> list[Asked]:
        """All questions, by context."""
        return [Asked(i, e, q) for i, e in enumerate(self.examples) for q in e.questions]


def batches(task: Task, tokens: int) -> list[Batch]:
    """The contexts of a task, at most `tokens` tokens with padding, but at least one a batch."""
    ordered = sorted(task.examples, key=lambda example: len(example.context))
    found = grouped(ordered, [(lambda e: len(e.context), tokens)])
    return [Batch(tuple(examples)) for examples in found]


def agnostic_groups(batch: Batch, vocabulary: int, tokens: int) -> list[list[Asked]]:
    """Questions that are fed together behind their compressed contexts."""
    return grouped(
        batch.asked,
        [
            (lambda a: _fed(a, len(a.question.prompt)), tokens),
            (lambda a: _keys(a), _KEYS * tokens),
            (lambda a: _logits(a, vocabulary), _LOGITS * tokens),
        ],
    )


def aware_groups(batch: Batch, vocabulary: int, tokens: int) -> list[list[Asked]]:
    """Questions whose prompts, contexts included, are compressed together."""
    return grouped(
        batch.asked,
        [
            (lambda a: len(a.prompt), tokens),
            (lambda a: _keys(a), _KEYS * tokens),
            (lambda a: _logits(a, vocabulary), _LOGITS * tokens),
        ],
    )


def grouped(
    items: Sequence[Item], limits: Iterable[tuple[Callable[[Item], int], int]]
) -> list[list[Item]]:
    """Runs of neighbours that padded to the largest among them stay within every limit.

    limits: (size of one item, most that a group may have). An item too large goes alone.
    """
    limits, groups = list(limits), []
    group: list[Item] = []
    largest = [0] * len(limits)
    for item in items:
        sizes = [size(item) for size, _ in limits]
        both = [max(pair) for pair in zip(largest, sizes, strict=True)]
        over = any(
            size * (len(group) + 1) > most for size, (_, most) in zip(both, limits, strict=True)
        )
        if group and over:
            groups.append(group)
            group, both = [], sizes
        group.append(item)
        largest = both
    return [*groups, group] if group else groups


def by_length(items: Iterable[Item], length: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Items of one length, shortest first."""
    found: dict[int, list[Item]] = {}
    for item in items:
        found.setdefault(length(item), []).append(item)
    for key in sorted(found):
        yield found[key]


def _fed(asked: Asked, prompt: int) -> int:
    return len(asked.answers) * (prompt + max(map(len, asked.answers)))


def _keys(asked: Asked) -> int:
    own = len(asked.example.context) + len(asked.question.prompt)
    return len(asked.answers) * (own + max(map(len, asked.answers)))


def _logits(asked: Asked, vocabulary: int) -> int:
    return len(asked.answers) * max(max(map(len, asked.answers)), 1) * vocabulary
