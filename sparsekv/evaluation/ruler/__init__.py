"""RULER's thirteen tasks at any length, written from their definitions (arXiv 2404.06654).

`ruler_builder("ruler-niah-multikey-2-16k")` builds contexts whose prompt and answer together have
at most 16384 tokens of the given tokenizer, and less than one sentence (word, document) fewer.

Scores are RULER's. Its wording is not: prompts, filler sentences and word lists are our own, texts
are those of the data folder, and depths are stratified. So are the differences between policies
comparable with each other, and the scores themselves not with published ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

from sparsekv.evaluation.example import Example, Question, Request, Task
from sparsekv.evaluation.ruler.fitting import Recipe, encode, fit
from sparsekv.evaluation.ruler.niah import VARIANTS, NiahMaker
from sparsekv.evaluation.ruler.questions import DocumentsMaker
from sparsekv.evaluation.ruler.variables import ChainMaker
from sparsekv.evaluation.ruler.word_lists import CommonWordsMaker, FrequentWordsMaker
from sparsekv.evaluation.scores import string_match_all, string_match_part

PREFIX = "ruler-"
_NAME = re.compile(r"ruler-(?P<task>[a-z0-9-]+?)-(?P<length>\d+)(?P<unit>k?)")
_SPARE = 8  # tokens beside the references in an answer


class Maker(Protocol):
    """Draws the examples of a task. new_tokens: what RULER lets a model generate."""

    new_tokens: int

    def draw(self, rng: Random, place: int, places: int) -> Recipe:
        """Example `place` of `places`."""


RULER: Mapping[str, Callable[[str, Path | None], Maker]] = {
    **dict.fromkeys(VARIANTS, NiahMaker),
    "vt": ChainMaker,
    "cwe": CommonWordsMaker,
    "fwe": FrequentWordsMaker,
    "qa-1": DocumentsMaker,
    "qa-2": DocumentsMaker,
}


@dataclass(frozen=True)
class RulerTask:
    """The builder of one task. task: a name of `RULER`. length: tokens of prompt and answer."""

    task: str
    length: int

    @property
    def name(self) -> str:
        """As users type it."""
        k, rest = divmod(self.length, 1024)
        return f"{PREFIX}{self.task}-{self.length if rest else f'{k}k'}"

    def __call__(self, request: Request) -> Task:
        """The task; see `Builder`.

        Raises:
            ValueError: texts that are missing or run out, or a length with no room for the task.
        """
        maker = RULER[self.task](self.task, request.data)
        places = request.contexts
        recipes = [
            maker.draw(Random(f"{self.name} {request.seed} {i}"), i, places) for i in range(places)
        ]
        tokenizer = request.tokenizer
        # Some tokenizers need more for the answer itself than RULER's limit.
        answers = (", ".join(recipe.references) for recipe in recipes)
        longest = max((len(encode(tokenizer, a, first=False)) for a in answers), default=0)
        new = max(maker.new_tokens, longest + _SPARE)
        examples: list[Example] = []
        guess = 1
        for i, recipe in enumerate(recipes):
            fitted = fit(recipe, tokenizer, self.length - new, guess)
            guess = fitted.size
            question = Question("0", fitted.question, references=fitted.references)
            examples.append(Example(f"{self.name}/{i}", fitted.context, (question,)))
        any_of = self.task.startswith("qa-")
        score = string_match_part if any_of else string_match_all
        return Task(self.name, "generated", score.__name__, tuple(examples), new, score)


def ruler_builder(name: str) -> RulerTask:
    """The builder of a name such as "ruler-niah-single-1-4k" or "ruler-vt-10000".

    Raises:
        ValueError: no such task, or no length.
    """
    match = _NAME.fullmatch(name)
    if match is None or match["task"] not in RULER:
        raise ValueError(
            f"expected ruler-TASK-LENGTH, TASK of {', '.join(RULER)} and LENGTH such as 4k, got "
            f"{name!r}"
        )
    return RulerTask(match["task"], int(match["length"]) * (1024 if match["unit"] else 1))
