"""Passages of real text, and token-wise surgery on them.

Token ids are put together from pieces that begin with a space or a line break, where the usual
tokenizers cut anyway, so that a context has exactly the length that its task's name says.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsekv.evaluation.example import Request

PROSE, CODE = "prose/*.txt", "code/*.txt"
# Characters read for a token of a passage: English prose has 4.3 in SmolLM2's tokens, code 3.5.
_CHARACTERS = 6


def data_file(request: Request, name: str, purpose: str) -> Path:
    """A file or folder of the data.

    Raises:
        ValueError: no data was given, or it has no such file.
    """
    if request.data is None:
        raise ValueError(f"expected --data with the evaluation texts for {purpose}, got none")
    path = request.data / name
    if not path.exists():
        raise ValueError(f"expected {name} in --data for {purpose}, got none in {request.data}")
    return path


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a piece that follows another: no special tokens, and no space that is not there.

    Some tokenizers (Llama 2's, Mistral's) put a space before whatever they are given. Then the
    piece is read behind a letter, or behind a line break if it begins with no white space itself.
    """
    plain, letter = _plain(tokenizer, text), _plain(tokenizer, "x")
    if not text or tokenizer.convert_ids_to_tokens(letter) == ["x"]:
        return plain
    before = "x" if text[0].isspace() else "\n"
    front, both = _plain(tokenizer, before), _plain(tokenizer, before + text)
    return both[len(front) :] if both[: len(front)] == front else plain


def opening(tokenizer: Any, text: str) -> list[int]:
    """Token ids of the first piece, with the special tokens that the tokenizer puts before it."""
    alone, marked = _plain(tokenizer, "x"), list(tokenizer("x")["input_ids"])
    places = range(len(marked))
    start = next((i for i in places if marked[i : i + len(alone)] == alone), 0)
    return marked[:start] + _plain(tokenizer, text)


def _plain(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def passages(request: Request, pattern: str, tokens: int, rng: random.Random) -> list[list[int]]:
    """One passage of exactly `tokens` token ids a context, spread evenly over all files.

    pattern: `PROSE` or `CODE`. Each starts at a paragraph (or at a line, if no paragraph is near),
    in a stratum of its own of all places where a passage can start, so that they overlap as little
    as possible; their order is random.

    Raises:
        ValueError: no data, or no file that is long enough.
    """
    folder = data_file(request, pattern.split("/")[0], f"texts of {tokens} tokens")
    need = tokens * _CHARACTERS
    files = {path: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))}
    long = [text for text in files.values() if len(text) > need]
    if not long:
        longest = max((len(text) for text in files.values()), default=0)
        raise ValueError(
            f"expected a text of more than {need} characters in {folder}, got at most {longest}"
        )
    ends = [0]
    for text in long:
        ends.append(ends[-1] + len(text) - need)
    found = []
    for i in range(request.contexts):
        place = int((i + rng.random()) / request.contexts * ends[-1])
        which = min(bisect_right(ends, place) - 1, len(long) - 1)
        start = _line_start(long[which], place - ends[which])
        ids = encode(request.tokenizer, long[which][start : start + need])
        if len(ids) < tokens:
            raise ValueError(f"expected {tokens} tokens in {need} characters, got {len(ids)}")
        found.append(ids[:tokens])
    rng.shuffle(found)
    return found


def _line_start(text: str, place: int) -> int:
    """Where a paragraph starts in the 2000 characters before `place`, else a line, else place."""
    for mark in ("\n\n", "\n"):
        at = text.rfind(mark, max(place - 2000, 0), place)
        if at >= 0:
            return at + len(mark)
    return place


def sentence_ends(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Places i such that a sentence ends with token i - 1, ascending; 0 is one."""
    different = sorted(set(ids))
    texts = tokenizer.convert_ids_to_tokens(different)
    ends = {i for i, text in zip(different, texts, strict=True) if text.endswith((".", "!", "?"))}
    return [0] + [i + 1 for i, token in enumerate(ids) if token in ends]


def insert(
    tokenizer: Any, ids: Sequence[int], pieces: Sequence[Sequence[int]], depths: Sequence[float]
) -> list[int]:
    """`ids` with each piece put behind the sentence end nearest to its depth in [0, 1]."""
    places = sentence_ends(tokenizer, ids)
    chosen = [_nearest(places, depth * len(ids)) for depth in depths]
    order = sorted(range(len(pieces)), key=lambda i: (chosen[i], depths[i]))
    out: list[int] = []
    before = 0
    for i in order:
        out += [*ids[before : chosen[i]], *pieces[i]]
        before = chosen[i]
    return [*out, *ids[before:]]


def _nearest(places: Sequence[int], wanted: float) -> int:
    at = bisect_left(places, wanted)
    return min(places[max(at - 1, 0) : at + 1], key=lambda place: abs(place - wanted))


def strata(count: int, rng: random.Random) -> list[float]:
    """`count` depths in [0, 1], one at random in each of as many equal parts, ascending."""
    return [(i + rng.random()) / count for i in range(count)]
