"""What needles are hidden in: prose of the data folder, or a few sentences over and over.

Needles stand between sentences, so that none is torn apart by the text around it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

NOISE = (
    "The river runs to the sea. ",
    "Leaves turn in the wind. ",
    "A bell rings at noon. ",
    "The road goes on and on. ",
    "Then all is quiet. ",
)
_SENTENCE = re.compile(r"\S.*?(?:[.!?][\"'”’)]*(?=\s)|\Z)\s*", re.DOTALL)


@dataclass(frozen=True)
class Haystack:
    """Sentences with the white space that follows them, repeated without end from `start`."""

    sentences: tuple[str, ...]
    start: int = 0

    def take(self, size: int) -> list[str]:
        """The first `size` sentences."""
        count = len(self.sentences)
        return [self.sentences[(self.start + i) % count] for i in range(size)]

    def holds(self, text: str) -> bool:
        """Whether any sentence contains `text`."""
        return any(text in sentence for sentence in self.sentences)


def prose_files(data: Path | None) -> list[Path]:
    """The texts of `data`/prose in order of their names.

    Raises:
        ValueError: no folder, or none in it.
    """
    files = sorted((data / "prose").glob("*.txt")) if data is not None else []
    if not files:
        raise ValueError(f"expected a data folder with prose/*.txt, got {str(data)!r}")
    return files


def prose(data: Path | None) -> tuple[str, ...]:
    """The sentences of all texts."""
    texts = (file.read_text(encoding="utf-8") for file in prose_files(data))
    return tuple(sentence for text in texts for sentence in _SENTENCE.findall(text))


def hide(sentences: Sequence[str], needles: Sequence[tuple[float, str]]) -> str:
    """The sentences as one text with each needle (depth, sentence) at its depth, 0 first, 1 last.

    Needles at one place stand in the order given.
    """
    places: dict[int, list[str]] = {}
    for depth, needle in needles:
        places.setdefault(round(depth * len(sentences)), []).append(needle)
    pieces: list[str] = []
    for i in range(len(sentences) + 1):
        pieces += [f"{needle} " for needle in places.get(i, ())]
        pieces += sentences[i : i + 1]
    return "".join(pieces)


def depths(rng: Random, count: int, place: int, places: int) -> list[float]:
    """`count` depths in [0, 1]; the first is drawn from stratum `place` of `places`.

    RULER draws depths freely. With few contexts the draw then decides the score of a policy that
    keeps the newest tokens, so the needle that is asked about goes evenly through all depths.
    """
    return [(place + rng.random()) / places, *(rng.random() for _ in range(count - 1))]
