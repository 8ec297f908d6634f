"""What a task is made of: contexts in token ids, each with its questions.

The cut between a context and its questions is where the question-agnostic protocol compresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

# forced: the answer's tokens are fed and scored. choice: the likelier of several answers.
# generated: up to max_new_tokens are generated and the text is scored against the references.
Kind = Literal["forced", "choice", "generated"]


@dataclass(frozen=True)
class Question:
    """One question about a context.

    id: unique in its context. prompt: token ids after the cut, up to the answer; at least one.
    answers: token ids; one of them if forced, the choices if choice, none if generated.
    right: index of the right choice. references: texts that a generated answer is scored against.
    """

    id: str
    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...] = ()
    right: int = 0
    references: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt or not all(self.answers):
            raise ValueError(
                f"expected at least one token in the prompt and in every answer of question "
                f"{self.id!r}, got {self.prompt} and {self.answers}"
            )


@dataclass(frozen=True)
class Example:
    """A context (token ids, special tokens included) and its questions; id: unique in its task."""

    id: str
    context: tuple[int, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Task:
    """A named list of examples.

    name: as users type it, such as "needle-1k". headline: the metric of the tables, "em", "acc",
    "nll", "mc" or the name of `score`. score: for generated answers, (text, references) -> 0..1.
    control: must not drop, whatever is evicted.
    """

    name: str
    kind: Kind
    headline: str
    examples: tuple[Example, ...]
    max_new_tokens: int = 0
    score: Callable[[str, tuple[str, ...]], float] | None = None
    control: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for what would give a score of no meaning, or one question for two."""
        if self.kind == "generated" and (self.score is None or self.max_new_tokens < 1):
            raise ValueError(f"expected a score and max_new_tokens >= 1 in {self.name}, got less")
        _once([example.id for example in self.examples], self.name)
        for example in self.examples:
            _once([question.id for question in example.questions], f"{self.name} {example.id}")
            for question in example.questions:
                self._check(question)

    def _check(self, question: Question) -> None:
        count, right = len(question.answers), question.right
        fits = {"forced": count == 1, "choice": 0 <= right < count, "generated": count == 0}
        if not fits[self.kind]:
            raise ValueError(
                f"expected answers as kind {self.kind!r} takes them in question {question.id!r} of "
                f"{self.name}, got {count} and right={right}"
            )


def _once(names: list[str], where: str) -> None:
    if len(set(names)) < len(names):
        raise ValueError(f"expected every id once in {where}, got {sorted(names)}")


@dataclass(frozen=True)
class Request:
    """What a task is built from.

    tokenizer: of the model. data: folder of texts, or None where a task needs none.
    contexts: how many examples. seed: of everything drawn.
    """

    tokenizer: Any
    data: Path | None
    contexts: int
    seed: int


class Builder(Protocol):
    """Makes a task; the same request gives the same task."""

    def __call__(self, request: Request) -> Task: ...
