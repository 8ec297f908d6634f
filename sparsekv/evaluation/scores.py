"""Scores of generated answers: (text, references) -> 0..1.

RULER (arXiv 2404.06654): `string_match_all`, `string_match_part`. LongBench (arXiv 2308.14508): the
others; of several references the best counts. Three of them differ from LongBench's own program:
Chinese is compared by characters (there: words of a segmenter), `rouge_l` is ROUGE-L of the whole
text as in the package rouge-score (there: an older package), and `code_similarity` is exact (there:
a heuristic, or this, by what is installed).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

Score = Callable[[str, tuple[str, ...]], float]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"\d+")
_LATIN_WORD = re.compile(r"[a-z0-9]+")
# One Chinese character, or a run of letters and digits of another script.
_CHINESE_UNIT = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]|[^\W_\u3400-\u4dbf\u4e00-\u9fff]+")
_COMMENT_MARKS = ("`", "#", "//")


def string_match_all(text: str, references: tuple[str, ...]) -> float:
    """The share of the references that the text contains; case does not count."""
    return sum(_contains(text, reference) for reference in references) / len(references)


def string_match_part(text: str, references: tuple[str, ...]) -> float:
    """1 if the text contains any reference; case does not count."""
    return float(any(_contains(text, reference) for reference in references))


def _contains(text: str, reference: str) -> bool:
    return reference.lower() in text.lower()


def qa_f1(text: str, references: tuple[str, ...]) -> float:
    """F1 of the bags of words, without case, punctuation and articles."""
    return _best(text, references, lambda a, b: bag_f1(_answer_words(a), _answer_words(b)))


def qa_f1_zh(text: str, references: tuple[str, ...]) -> float:
    """F1 of the bags of Chinese characters (and words of other scripts)."""
    return _best(text, references, lambda a, b: bag_f1(_units(a), _units(b)))


def rouge_l(text: str, references: tuple[str, ...]) -> float:
    """ROUGE-L F1 over lower-case words of letters a-z and digits."""
    return _best(text, references, lambda a, b: lcs_f1(_words(a), _words(b)))


def rouge_l_zh(text: str, references: tuple[str, ...]) -> float:
    """ROUGE-L F1 over Chinese characters (and words of other scripts)."""
    return _best(text, references, lambda a, b: lcs_f1(_units(a), _units(b)))


def count(text: str, references: tuple[str, ...]) -> float:
    """The share of the numbers in the text that are the right one; 0 without a number."""
    numbers = _NUMBER.findall(text)
    return _best(text, references, lambda _, b: numbers.count(b) / max(len(numbers), 1))


def retrieval(text: str, references: tuple[str, ...]) -> float:
    """As `count`, for references such as "Paragraph 12" and "段落12".

    Raises:
        ValueError: a reference without a number.
    """
    numbers = [_NUMBER.search(reference) for reference in references]
    if not all(numbers):
        raise ValueError(f"expected a number in every reference, got {references!r}")
    return count(text, tuple(number[0] for number in numbers if number))


def code_similarity(text: str, references: tuple[str, ...]) -> float:
    """2 LCS / (|a| + |b|) of the first line that has no mark of a comment or a code block."""
    lines = text.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(mark in x for mark in _COMMENT_MARKS)), "")
    return _best(line, references, lcs_f1)


def classification(text: str, references: tuple[str, ...], classes: Sequence[str]) -> float:
    """1 / n if the right class is one of the n classes that the text names, else 0.

    A class whose name is part of the right one's name is not counted beside it.
    """

    def one(a: str, right: str) -> float:
        named = {c for c in classes if c in a and (c == right or c not in right)}
        return 1.0 / len(named) if right in named else 0.0

    return _best(text, references, one)


def first_line(score: Score) -> Score:
    """`score` of the first line that is not empty: what follows an answer to a list of examples."""

    def scored(text: str, references: tuple[str, ...]) -> float:
        return score(text.lstrip("\n").split("\n")[0], references)

    return scored


def bag_f1(a: Sequence[Hashable], b: Sequence[Hashable]) -> float:
    """2 |a ∩ b| / (|a| + |b|) of multisets; 0 if nothing is common."""
    return _f1(sum((Counter(a) & Counter(b)).values()), len(a), len(b))


def lcs_f1(a: Sequence[Hashable], b: Sequence[Hashable]) -> float:
    """2 LCS / (|a| + |b|), LCS the length of the longest common subsequence; 0 if it is 0."""
    return _f1(lcs(a, b), len(a), len(b))


def lcs(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Length of the longest common subsequence, |a| positions at once in the bits of an integer."""
    places: dict[Hashable, int] = {}
    for i, x in enumerate(a):
        places[x] = places.get(x, 0) | 1 << i
    full = (1 << len(a)) - 1
    row = full  # bit i is 0 where the best subsequence grows at a[i]
    for y in b:
        hits = row & places.get(y, 0)
        row = ((row + hits) | (row - hits)) & full
    return len(a) - row.bit_count()


def _f1(common: int, a: int, b: int) -> float:
    return 2 * common / (a + b) if common else 0.0


def _best(text: str, references: tuple[str, ...], one: Callable[[str, str], float]) -> float:
    return max((one(text, reference) for reference in references), default=0.0)


def _answer_words(text: str) -> list[str]:
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return _ARTICLES.sub(" ", plain).split()


def _words(text: str) -> list[str]:
    return _LATIN_WORD.findall(text.lower())


def _units(text: str) -> list[str]:
    return _CHINESE_UNIT.findall(text.lower())
