"""RULER's two question tasks: the paragraph with the answer among others without it.

qa-1 asks XQuAD (questions of SQuAD, as RULER's first) over its paragraphs; qa-2 asks Natural
Questions over its passages, where RULER has HotpotQA, whose questions take two paragraphs. Beyond
some 40k tokens XQuAD's paragraphs run out and passages of Natural Questions follow.

No other paragraph holds an answer as words, and no answer is shorter than three characters, so
that an answer is not right by chance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

_OPENING = "The answer to the question that follows stands in one of these documents.\n\n"
_QUESTION = (
    "\n\nAnswer from the documents, in a few words of theirs and nothing else.\n\n"
    "Question: {question}\nAnswer:"
)
_SHORTEST = 3
_WORDS = re.compile(r"\w+")


@dataclass(frozen=True)
class Item:
    """A question, its answers, and the paragraph that holds them."""

    question: str
    answers: tuple[str, ...]
    paragraph: str


@dataclass(frozen=True)
class Documents:
    """One question; see `Recipe`. A unit is a paragraph without the answer."""

    gold: str
    depth: float
    others: tuple[str, ...]
    order: tuple[float, ...]
    question: str
    references: tuple[str, ...]
    material: str = "paragraphs in qa/"

    @property
    def most(self) -> int:
        """Paragraphs that there are."""
        return len(self.others)

    def context(self, size: int) -> str:
        """The paragraph with the answer among the first `size` others, in an order drawn before."""
        chosen = sorted(range(size), key=self.order.__getitem__)
        texts = [self.others[i] for i in chosen]
        texts.insert(round(self.depth * size), self.gold)
        listed = (f"Document {i}:\n{text}" for i, text in enumerate(texts, 1))
        return _OPENING + "\n\n".join(listed)


class DocumentsMaker:
    """Draws questions and distractors."""

    new_tokens = 32

    def __init__(self, name: str, data: Path | None) -> None:
        if data is None:
            raise ValueError(f"expected a data folder with qa/ for {name}, got None")
        read, more = SOURCES[name]
        items = read(data)
        self.items = [x for x in items if all(len(a) >= _SHORTEST for a in x.answers)]
        more_items = more(data) if more is not None else []
        self.paragraphs = list(dict.fromkeys(x.paragraph for x in items))
        known = set(self.paragraphs)
        extra = dict.fromkeys(x.paragraph for x in more_items if x.paragraph not in known)
        self.extra = list(extra)
        self._words = {text: _spaced(text) for text in (*self.paragraphs, *self.extra)}

    def draw(self, rng: Random, place: int, places: int) -> Documents:
        """Example `place` of `places`."""
        item = rng.choice(self.items)
        near = self._without(item, self.paragraphs)
        far = self._without(item, self.extra)
        others = (*rng.sample(near, len(near)), *rng.sample(far, len(far)))
        return Documents(
            item.paragraph, (place + rng.random()) / places, others,
            tuple(rng.random() for _ in others), _QUESTION.format(question=item.question),
            item.answers,
        )  # fmt: skip

    def _without(self, item: Item, paragraphs: list[str]) -> list[str]:
        """The paragraphs that hold no answer and are not the item's own."""
        answers = [_spaced(answer) for answer in item.answers]
        return [
            text
            for text in paragraphs
            if text != item.paragraph and not any(a in self._words[text] for a in answers)
        ]


def _spaced(text: str) -> str:
    """Words in lower case between single spaces: " the answer "."""
    return f" {' '.join(_WORDS.findall(text.lower()))} "


def read_xquad(data: Path) -> list[Item]:
    """Questions of `data`/qa/xquad.en.json."""
    articles = json.loads(_read(data / "qa" / "xquad.en.json"))["data"]
    return [
        Item(qa["question"].strip(), _unique(a["text"] for a in qa["answers"]), part["context"])
        for article in articles
        for part in article["paragraphs"]
        for qa in part["qas"]
    ]


def read_nq(data: Path) -> list[Item]:
    """Questions of `data`/qa/nq-open-oracle.jsonl whose passage holds an answer."""
    lines = _read(data / "qa" / "nq-open-oracle.jsonl").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    items = [Item(r["question"].strip(), _unique(r["answers"]), r["passage"]) for r in rows]
    return [x for x in items if any(_spaced(a) in _spaced(x.paragraph) for a in x.answers)]


def _unique(answers: object) -> tuple[str, ...]:
    return tuple(dict.fromkeys(answer.strip() for answer in answers))  # type: ignore[attr-defined]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"expected a readable file {str(file)!r}, got {error}") from error


Reader = Callable[[Path], list[Item]]
SOURCES: dict[str, tuple[Reader, Reader | None]] = {
    "qa-1": (read_xquad, read_nq),
    "qa-2": (read_nq, None),
}
