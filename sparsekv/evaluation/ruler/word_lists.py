"""RULER's two counting tasks: common words of a numbered list, frequent words of a coded text.

cwe: ten words stand 30 times each in a list, all others 3 times; which are the ten? A small solved
example comes first. The words are those of the data folder's prose.
fwe: coded words follow a zeta distribution: of N words the k-th is N k^-a / zeta(a), a = 2. The
first is written as dots, which do not count; which are the next three?
(arXiv 2404.06654, section 3 and Appendix B.)
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

from sparsekv.evaluation.ruler.haystack import prose_files
from sparsekv.evaluation.ruler.names import consonants

COMMON, COMMON_TIMES, OTHER_TIMES = 10, 30, 3
DEMO_OTHERS, DEMO_COMMON_TIMES, DEMO_OTHER_TIMES = 10, 6, 1
ZETA, ZETA_OF_2, FREQUENT = 2.0, 1.6449340668482264, 3
DOTS = "...."
_CODE_LENGTH = 6
_LEAST_CODED = 60  # ranks 4 and 5 differ by more than one from here on
_FUNCTION_WORDS = 500  # the most frequent words of the prose, which any answer may hold
_WORD = re.compile(r"(?<![\w'’-])[a-z]{4,12}(?![\w'’-])")
_CWE_OPENING = "In the numbered list of words below some come more often than others. Count them.\n"
_CWE_QUESTION = (
    "\n\nQuestion: Name the ten words that come most often in the list.\n"
    "Answer: The ten words that come most often are"
)
_FWE_OPENING = "Count how often each coded word comes in the text below.\n\n"
_FWE_QUESTION = (
    "\n\nQuestion: Leave the dots aside. Name the three coded words that come most often.\n"
    "Answer: The three coded words that come most often are"
)


@dataclass(frozen=True)
class CommonWords:
    """One list; see `Recipe`. A unit is one more word that is not common."""

    demo: str
    others: tuple[str, ...]
    references: tuple[str, ...]
    seed: int
    question: str = _CWE_QUESTION
    material: str = "words in prose/*.txt"

    @property
    def most(self) -> int:
        """Words that there are."""
        return len(self.others)

    def context(self, size: int) -> str:
        """The solved example, then the list with `size` other words."""
        entries = [*self.references] * COMMON_TIMES + [*self.others[:size]] * OTHER_TIMES
        return self.demo + _CWE_OPENING + _numbered(entries, Random(self.seed))


class CommonWordsMaker:
    """Draws lists of words from the prose."""

    new_tokens = 120

    def __init__(self, name: str, data: Path | None) -> None:
        texts = (file.read_text(encoding="utf-8") for file in prose_files(data))
        counts = Counter(word for text in texts for word in _WORD.findall(text))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        asked = _CWE_OPENING + _CWE_QUESTION
        self.words = sorted(word for word in ranked[_FUNCTION_WORDS:] if word not in asked)
        if len(self.words) < 2 * COMMON + DEMO_OTHERS + 1:
            raise ValueError(f"expected more words in prose/*.txt, got {len(ranked)}")

    def draw(self, rng: Random, place: int, places: int) -> CommonWords:
        """Example `place` of `places`."""
        words = rng.sample(self.words, len(self.words))
        common: list[str] = []
        while len(common) < 2 * COMMON:
            word = words.pop()
            if not any(word in other or other in word for other in common):
                common.append(word)
        shown, right = common[:COMMON], common[COMMON:]
        others = [w for w in words if not any(word in w for word in common)]
        entries = shown * DEMO_COMMON_TIMES + others[:DEMO_OTHERS] * DEMO_OTHER_TIMES
        listed = _CWE_OPENING + _numbered(entries, rng)
        demo = f"{listed}{_CWE_QUESTION} {_enumerated(shown)}\n\n"
        seed = rng.getrandbits(64)
        return CommonWords(demo, tuple(others[DEMO_OTHERS:]), tuple(right), seed)


@dataclass(frozen=True)
class FrequentWords:
    """One coded text; see `Recipe`. A unit is one word more of the text."""

    seed: int
    references: tuple[str, ...]
    question: str = _FWE_QUESTION
    most: int | None = None
    material: str = "coded words"

    def context(self, size: int) -> str:
        """`size` words and a few, in an order that depends on their number."""
        rng, total = Random(self.seed), size + _LEAST_CODED
        counts = zeta_counts(total)
        words = [DOTS, *_codes(rng, len(counts) - 1)]
        entries = [word for word, n in zip(words, counts, strict=True) for _ in range(n)]
        rng.shuffle(entries)
        return _FWE_OPENING + " ".join(entries)


class FrequentWordsMaker:
    """Draws coded texts."""

    new_tokens = 50

    def __init__(self, name: str, data: Path | None) -> None:
        self.name = name

    def draw(self, rng: Random, place: int, places: int) -> FrequentWords:
        """Example `place` of `places`."""
        seed = rng.getrandbits(64)
        return FrequentWords(seed, tuple(_codes(Random(seed), FREQUENT)))


def zeta_counts(total: int) -> list[int]:
    """How often the words of ranks 1, 2, ... come among about `total` words: those of 1 or more."""
    counts: list[int] = []
    while (n := round(total * (len(counts) + 1) ** -ZETA / ZETA_OF_2)) > 0:
        counts.append(n)
    return counts


def _codes(rng: Random, count: int) -> list[str]:
    return consonants(rng, _CODE_LENGTH, count, set())


def _numbered(entries: list[str], rng: Random) -> str:
    shuffled = rng.sample(entries, len(entries))
    return " ".join(f"{i}. {word}" for i, word in enumerate(shuffled, 1))


def _enumerated(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
