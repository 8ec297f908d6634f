"""A folder of results: what was asked for (`run.json`) and a line a record (`results.jsonl`).

Lines are flushed and synced before the next forward, so a killed run loses nothing but the forward
it was in. A torn last line is dropped when the run goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from sparsekv.evaluation.records import Record

RESULTS, RUN = "results.jsonl", "run.json"


class Results:
    """Records of a folder that is being filled; use it as a context manager."""

    def __init__(self, folder: Path, config: Mapping[str, Any], *, resume: bool = False) -> None:
        """config: what must not change between the parts of a run; a dict in it is compared where
        both have a key, and grows. Its "history" is a list that grows, and is not compared.

        Raises:
            ValueError: results without resume, another configuration, or unreadable lines.
        """
        self.path = folder / RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        self.records: list[Record] = []
        config = dict(config)
        held = self.path.exists() and self.path.stat().st_size > 0
        if held and not resume:
            raise ValueError(f"expected --resume or a folder without results, got {folder}")
        if resume and self.path.exists():
            config = _merged(read_config(folder), config, folder)
            self.records = list(read_records(folder))
        text = json.dumps(config, indent=2) + "\n"
        draft = folder / f"{RUN}.new"
        draft.write_text(text, encoding="utf-8")
        draft.replace(folder / RUN)
        if self.path.exists():
            _cut_torn_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def add(self, records: Iterable[Record]) -> None:
        """Write records, for good."""
        for record in records:
            self._file.write(json.dumps(record.to_dict(), ensure_ascii=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Results:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def read_config(folder: Path) -> dict[str, Any]:
    """`run.json` of a folder.

    Raises:
        ValueError: none, or no JSON.
    """
    try:
        found: dict[str, Any] = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"expected {RUN} of an evaluation in {folder}, got {error}") from error
    return found


def read_records(folder: Path) -> Iterator[Record]:
    """The records of a folder, a torn last line left out.

    Raises:
        ValueError: no results, or a line that is no record.
    """
    try:
        file = (folder / RESULTS).open("rb")  # a torn line may end within a character
    except OSError as error:
        raise ValueError(f"expected {RESULTS} of an evaluation in {folder}, got {error}") from error
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield Record.from_dict(json.loads(line))
            except (json.JSONDecodeError, ValueError, TypeError) as error:
                raise ValueError(
                    f"expected a record in line {number} of {folder / RESULTS}, got {error}"
                ) from error


def _cut_torn_line(path: Path) -> None:
    """Remove what stands behind the last line break."""
    with path.open("rb+") as file:
        whole = file.read()
        file.truncate(whole.rfind(b"\n") + 1)


def _merged(old: dict[str, Any], new: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The new configuration with what only the old one has."""
    merged = old | new
    for name, value in new.items():
        before = old.get(name, value)
        if name == "history":
            merged[name] = [*before, *value] if before is not value else value
        elif isinstance(value, dict) and isinstance(before, dict):
            for key in value:
                _same(f"{name} of {key}", before.get(key, value[key]), value[key], folder)
            merged[name] = before | value
        else:
            _same(name, before, value, folder)
    return merged


def _same(name: str, old: object, new: object, folder: Path) -> None:
    if old != new:
        raise ValueError(
            f"expected the {name} of the run that is resumed in {folder}, {old!r}, got {new!r}"
        )
