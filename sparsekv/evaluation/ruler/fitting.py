"""Fill a context up to a number of tokens: never longer, and less than one unit shorter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from sparsekv.evaluation.texts import encode as encode_piece
from sparsekv.evaluation.texts import opening


class Recipe(Protocol):
    """One example, drawn, that can be written out at any size."""

    @property
    def most(self) -> int | None:
        """The largest size that the material allows; None: any."""

    @property
    def material(self) -> str:
        """What runs out then."""

    @property
    def question(self) -> str:
        """The text after the cut, up to the answer."""

    @property
    def references(self) -> tuple[str, ...]:
        """What an answer is scored against."""

    def context(self, size: int) -> str:
        """The text before the cut with `size` units (sentences, words, documents), 0 or more.

        The same size gives the same text.
        """


@dataclass(frozen=True)
class Fitted:
    """A recipe at the largest size that fits: context and question in token ids."""

    size: int
    context: tuple[int, ...]
    question: tuple[int, ...]
    references: tuple[str, ...]


def encode(tokenizer: Any, text: str, *, first: bool) -> tuple[int, ...]:
    """Token ids; first: the text opens the sequence, so special tokens come before it."""
    return tuple(opening(tokenizer, text) if first else encode_piece(tokenizer, text))


def fit(recipe: Recipe, tokenizer: Any, room: int, guess: int) -> Fitted:
    """The recipe at the largest size whose context and question have at most `room` tokens.

    guess: a size to begin with; the size found does not depend on it where tokens grow with size.

    Raises:
        ValueError: not even size 0 fits, or the material ends before the room.
    """
    question = encode(tokenizer, recipe.question, first=False)
    contexts: dict[int, tuple[int, ...]] = {}

    def tokens(size: int) -> int:
        if size not in contexts:
            contexts[size] = encode(tokenizer, recipe.context(size), first=True)
        return len(contexts[size]) + len(question)

    if tokens(0) > room:
        raise ValueError(f"expected room for at least {tokens(0)} prompt tokens, got {room}")
    size = largest(tokens, room, recipe.most, guess)
    if size == recipe.most:
        raise ValueError(
            f"expected enough {recipe.material} for {room} tokens, got {recipe.most}, which make "
            f"{tokens(size)}"
        )
    return Fitted(size, contexts[size], question, recipe.references)


def largest(tokens: Callable[[int], int], room: int, most: int | None, guess: int) -> int:
    """A size with tokens(size) <= room and tokens(size + 1) > room, or `most`; tokens(0) <= room.

    Tokens are almost linear in the size, so the next size to try is read off a line, and every
    third time it is the middle, in case the line misleads.
    """
    low, high, tries = 0, None, 0
    while low != most and (high is None or high - low > 1):
        tries += 1
        if high is None:
            below = tokens(low)
            size = low + 1 + low * (room - below) // max(below, 1) if low else max(guess, 1)
            size = size if most is None else min(size, most)
        elif tries % 3 == 0:
            size = (low + high) // 2
        else:
            below, above = tokens(low), tokens(high)
            step = (room - below) * (high - low) // max(above - below, 1)
            size = min(max(low + step, low + 1), high - 1)
        if tokens(size) <= room:
            low = size
        else:
            high = size
    return low
