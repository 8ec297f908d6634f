"""RULER's variable tracking: a chain of assignments in noise, and all names with one value.

X1 = V, X2 = X1, ... in order, hops + 1 names (arXiv 2404.06654: one chain, four hops). Names are
consonants only, so that no answer holds one by chance. A small solved example comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

from sparsekv.evaluation.ruler.haystack import NOISE, Haystack, depths, hide
from sparsekv.evaluation.ruler.names import consonants

HOPS = 4
_LENGTH = 5
_DEMO_SENTENCES = 10
_OPENING = "The text below hides assignments to variables. Follow them.\n\n"
_QUESTION = (
    "\n\nQuestion: Which variables hold the value {value} in the end? Name all of them.\n"
    "Answer: {count} variables hold the value {value}:"
)


@dataclass(frozen=True)
class Chain:
    """One chain in noise; see `Recipe`."""

    demo: str
    needles: tuple[tuple[float, str], ...]
    question: str
    references: tuple[str, ...]
    most: int | None = None
    material: str = "noise"

    def context(self, size: int) -> str:
        """The solved example, then the assignments among `size` sentences."""
        text = hide(Haystack(NOISE).take(size), self.needles)
        return self.demo + _OPENING + text.rstrip()


class ChainMaker:
    """Draws chains."""

    new_tokens = 30

    def __init__(self, name: str, data: Path | None) -> None:
        self.name = name

    def draw(self, rng: Random, place: int, places: int) -> Chain:
        """Example `place` of `places`; the first assignment is in its stratum of the depths."""
        taken: set[str] = set()
        values = rng.sample(range(10_000, 100_000), 2)
        demo = _chain(rng, taken, values[0], [rng.random() for _ in range(HOPS + 1)])
        solved = f"{demo.context(_DEMO_SENTENCES)}{demo.question} {', '.join(demo.references)}\n\n"
        start, *_ = depths(rng, 1, place, places)
        # The first must stay first: the others follow it.
        later = [start + (1 - start) * rng.random() for _ in range(HOPS)]
        chain = _chain(rng, taken, values[1], [start, *later])
        return Chain(solved, chain.needles, chain.question, chain.references)


def _chain(rng: Random, taken: set[str], value: int, where: list[float]) -> Chain:
    names = [name.upper() for name in consonants(rng, _LENGTH, len(where), taken)]
    lines = [f"VAR {names[0]} = {value}."]
    lines += [f"VAR {new} = VAR {old}." for old, new in pairwise(names)]
    question = _QUESTION.format(count=len(names), value=value)
    needles = tuple(zip(sorted(where), lines, strict=True))
    return Chain("", needles, question, tuple(names))
