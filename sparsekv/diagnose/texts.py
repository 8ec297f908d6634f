"""The texts that a diagnosis reads: the user's files, or Python's own help, as token ids."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

HELP = "pydoc_data.topics"


@dataclass(frozen=True)
class Text:
    """A text and where it is from."""

    name: str
    text: str

    @property
    def sha256(self) -> str:
        """Of its UTF-8 bytes, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def read_texts(files: list[Path] | None) -> list[Text]:
    """The files' texts, by name; without files, Python's help texts, one after the other.

    Raises:
        ValueError: a file that cannot be read as UTF-8.
    """
    if not files:
        return [Text(HELP, "\n\n".join(topics[name].strip() for name in sorted(topics)))]
    return [Text(file.name, read_file(file)) for file in files]


def read_file(file: Path) -> str:
    """Its text.

    Raises:
        ValueError: a file that cannot be read as UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"expected a UTF-8 text file, got {str(file)!r}: {reason}") from error


def first_ids(tokenizer: Any, text: Text, tokens: int) -> Tensor:
    """The first `tokens` ids int64 [1, T] of a text, special tokens in front; fewer if it is short.

    Raises:
        ValueError: fewer than one token asked for, or a text without any.
    """
    if tokens < 1:
        raise ValueError(f"expected at least 1 token, got {tokens}")
    ids = torch.tensor([tokenizer(text.text)["input_ids"][:tokens]], dtype=torch.long)
    if not ids.shape[1]:
        raise ValueError(f"expected a text of at least one token, got none in {text.name!r}")
    return ids


def stretches(tokenizer: Any, text: Text, tokens: int, most: int) -> list[Tensor]:
    """Stretches of a text of just `tokens` ids each, one after the other: at most `most`.

    Each begins with what the tokenizer puts in front of a text, the token that models attend to
    when there is nothing to attend to.

    Raises:
        ValueError: a text too short for one stretch, or nothing asked for.
    """
    front = list(tokenizer("")["input_ids"])
    size = tokens - len(front)
    if size < 1 or most < 1:
        raise ValueError(f"expected at least 1 stretch of some tokens, got {most} of {tokens}")
    ids = tokenizer(text.text, add_special_tokens=False)["input_ids"]
    starts = range(0, len(ids) - size + 1, size)[:most]
    if not starts:
        raise ValueError(
            f"expected a text of at least {size} tokens, got {len(ids)} in {text.name!r}"
        )
    return [torch.tensor([front + ids[start : start + size]]) for start in starts]


def token_texts(tokenizer: Any, ids: Tensor) -> list[str]:
    """What each token of ids [1, T] reads as, with what cannot be seen escaped."""
    return [repr(tokenizer.decode([i]))[1:-1] for i in ids[0].tolist()]
