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


def stretches(
    tokenizer: Any, text: Text, tokens: int, later: int, most: int, *, repeat: bool
) -> list[Tensor]:
    """At most `most` prompts of a text with what comes later, ids int64 [1, tokens + later] each.

    The prompts are stretches of the text, one after the other. repeat: what comes later is a part
    of the prompt once more, from another place in each; else the text goes on. Each begins with
    what the tokenizer puts in front of a text, the token that models attend to when there is
    nothing to attend to.

    Raises:
        ValueError: a text too short for one of them, or nothing asked for.
    """
    front = list(tokenizer("")["input_ids"])
    size = tokens - len(front)
    if min(later, most) < 1 or size < (later if repeat else 1):
        raise ValueError(
            f"expected at least 1 prompt, with at least 1 token later and as many in front, got "
            f"{most} of {tokens} tokens and {later} later"
        )
    ids = tokenizer(text.text, add_special_tokens=False)["input_ids"]
    step = size if repeat else size + later
    starts = range(0, len(ids) - step + 1, step)[:most]
    if not starts:
        raise ValueError(
            f"expected a text of {step} tokens or more, got {len(ids)} in {text.name!r}"
        )
    found = []
    for i, start in enumerate(starts):
        own = ids[start : start + step]
        at = (size - later) * (i + 1) // (len(starts) + 1)
        found.append(torch.tensor([front + own + (own[at : at + later] if repeat else [])]))
    return found


def token_texts(tokenizer: Any, ids: Tensor) -> list[str]:
    """What each token of ids [1, T] reads as, with what cannot be seen escaped."""
    return [repr(tokenizer.decode([i]))[1:-1] for i in ids[0].tolist()]
