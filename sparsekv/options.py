"""Values on a command line that several commands take, checked before any work is done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def check_folder(option: str, file: Path) -> None:
    """Raise ValueError, naming the option, for a file that could not be written at the end."""
    if file.is_dir():
        raise ValueError(f"expected {option} to be a file, got the folder {str(file)!r}")
    if not file.parent.is_dir():
        raise ValueError(f"expected {option} in a folder that exists, got {str(file)!r}")


def make_folder(option: str, folder: Path) -> None:
    """Make a folder, if it is not there. Raises ValueError, naming the option, if it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        got = f"{str(folder)!r}: {error.strerror}"
        raise ValueError(f"expected {option} to be a folder to write to, got {got}") from error


def json_object(text: str, option: str) -> dict[str, Any]:
    """'{"a": 1}' -> {"a": 1}. Raises ValueError, naming the option, for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"expected {option} to be a JSON object, got {text!r}")
    return value
