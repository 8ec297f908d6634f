"""RULER's eight needle tasks: single 1-3, multikey 1-3, multivalue, multiquery.

A needle says a value of a key. What the tasks vary (RULER, arXiv 2404.06654, Appendix B):

    single 1      a few sentences over and over; words -> numbers
    single 2, 3   prose; words -> numbers, words -> UUIDs
    multikey 1    prose and four needles, one of them asked about
    multikey 2, 3 nothing but needles: words -> numbers, UUIDs -> UUIDs
    multivalue    four values of one key, all asked for
    multiquery    four keys, all asked about
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

from sparsekv.evaluation.ruler.haystack import NOISE, Haystack, depths, hide, prose
from sparsekv.evaluation.ruler.names import Kind, Names

_OPENING = (
    "The text below hides one or more special magic {values}. Keep them in mind: a question about "
    "them follows.\n\n"
)
_NEEDLE = "The special magic {value} for {key} is {name}."
_ONE = (
    "\n\nQuestion: Which special magic {value} does the text give for {keys}?\n"
    "Answer: The special magic {value} for {keys} is"
)
_MANY = (
    "\n\nQuestion: Which special magic {value}s does the text give for {keys}? Name all of them.\n"
    "Answer: The special magic {value}s for {keys} are"
)
_SINGULAR = {"numbers": "number", "uuids": "UUID"}


@dataclass(frozen=True)
class Variant:
    """hay: what the needles are hidden in. needles: how many stand in it (hay "needles": beside
    those of the hay). asked: how many keys are asked about. values: of each key that is asked."""

    hay: Literal["noise", "prose", "needles"]
    key: Kind = "words"
    value: Kind = "numbers"
    needles: int = 1
    asked: int = 1
    values: int = 1


VARIANTS = {
    "niah-single-1": Variant("noise"),
    "niah-single-2": Variant("prose"),
    "niah-single-3": Variant("prose", value="uuids"),
    "niah-multikey-1": Variant("prose", needles=4),
    "niah-multikey-2": Variant("needles"),
    "niah-multikey-3": Variant("needles", key="uuids", value="uuids"),
    "niah-multivalue": Variant("prose", needles=4, values=4),
    "niah-multiquery": Variant("prose", needles=4, asked=4),
}


@dataclass(frozen=True)
class Niah:
    """One needle example; see `Recipe`.

    hay: what the needles (depth, sentence) are hidden in, or None: other needles, with the keys and
    the names from number `first` on. value: what a name is called.
    """

    hay: Haystack | None
    needles: tuple[tuple[float, str], ...]
    keys: Names
    names: Names
    first: int
    value: str
    question: str
    references: tuple[str, ...]
    material: str = "two-word keys"

    @property
    def most(self) -> int | None:
        """Keys that are left for distractors."""
        left = self.keys.most
        return None if self.hay is not None or left is None else left - self.first

    def context(self, size: int) -> str:
        """The needles in `size` sentences."""
        sentences = self.hay.take(size) if self.hay is not None else self._distractors(size)
        text = hide(sentences, self.needles).rstrip()
        return _OPENING.format(values=f"{self.value}s") + text

    def _distractors(self, size: int) -> list[str]:
        ranks = range(self.first, self.first + size)
        pairs = ((self.keys[i], self.names[i]) for i in ranks)
        return [_NEEDLE.format(value=self.value, key=k, name=n) + " " for k, n in pairs]


class NiahMaker:
    """Draws examples of one variant; reads the prose once."""

    new_tokens = 128

    def __init__(self, name: str, data: Path | None) -> None:
        self.variant = VARIANTS[name]
        plain = {"noise": lambda: NOISE, "prose": lambda: prose(data), "needles": tuple}
        self.sentences: tuple[str, ...] = plain[self.variant.hay]()

    def draw(self, rng: Random, place: int, places: int) -> Niah:
        """Example `place` of `places`."""
        v = self.variant
        hay = Haystack(self.sentences, self._start(rng)) if self.sentences else None
        keys, names = Names(rng_of(rng), v.key), Names(rng_of(rng), v.value)
        while hay is not None and any(hay.holds(names[i]) for i in range(v.needles)):
            names = Names(rng_of(rng), v.value)
        value = _SINGULAR[v.value]
        # Needle i has key i, or the one key of them all.
        key_of = [keys[i // v.values] for i in range(v.needles)]
        lines = [_NEEDLE.format(value=value, key=k, name=names[i]) for i, k in enumerate(key_of)]
        where = depths(rng, v.needles, place, places)
        right = v.asked * v.values  # the first needles are asked about
        return Niah(
            hay, tuple(zip(where, lines, strict=True)), keys, names, v.needles, value,
            _question(value, list(dict.fromkeys(key_of[:right])), right),
            tuple(names[i] for i in range(right)),
        )  # fmt: skip

    def _start(self, rng: Random) -> int:
        return 0 if self.variant.hay == "noise" else rng.randrange(len(self.sentences))


def rng_of(rng: Random) -> Random:
    """A generator of its own, so that how much one supply draws does not change the others."""
    return Random(rng.getrandbits(64))


def _question(value: str, keys: list[str], right: int) -> str:
    listed = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"
    return (_ONE if right == 1 else _MANY).format(value=value, keys=listed)
