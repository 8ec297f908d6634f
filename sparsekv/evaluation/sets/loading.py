"""Rows of published data sets, through `datasets`: a local folder if the data has one, else a hub.

`datasets` is imported when rows are asked for.
"""

from __future__ import annotations

import csv
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsekv.evaluation.example import Request

Row = dict[str, Any]
_FORMATS = {"jsonl": "json", "json": "json", "parquet": "parquet", "csv": "csv"}
_LONGEST = 10_000_000  # tokenizers without a limit say some larger number


def import_datasets(purpose: str) -> Any:
    """The package.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"expected the package datasets for {purpose}, got none: pip install 'sparsekv[eval]'"
        ) from error
    return datasets


def local_folder(data: Path | None, name: str) -> Path | None:
    """The folder `name` of the data, or None where the hub is to be asked."""
    folder = None if data is None else data / name
    return folder if folder is not None and folder.is_dir() else None


def local_rows(
    folder: Path,
    stem: str,
    columns: Sequence[str],
    *,
    lists: Sequence[str] = (),
    header: bool = True,
) -> list[Row]:
    """The rows of `folder`/`stem`.jsonl, .json, .parquet or .csv.

    A .csv holds texts only: those of the columns `lists` are read as JSON. header: it names its
    columns in the first line, else they are `columns`.

    Raises:
        ValueError: no such file or several, or not those columns.
    """
    datasets = import_datasets(str(folder / stem))
    files = [folder / f"{stem}.{ending}" for ending in _FORMATS]
    files = [file for file in files if file.is_file()]
    if len(files) != 1:
        raise ValueError(
            f"expected one of {stem}.{{{','.join(_FORMATS)}}} in {folder}, got {len(files)}"
        )
    form = _FORMATS[files[0].suffix[1:]]
    options = _csv_options(datasets, files[0], columns, header) if form == "csv" else {}
    with tempfile.TemporaryDirectory() as cache:  # all rows are read at once, so none is kept
        found = datasets.load_dataset(
            form, data_files=str(files[0]), split="train", cache_dir=cache, **options
        )
        rows = checked(list(found), columns, str(files[0]))
    if form != "csv":
        return rows
    return [row | {name: json.loads(row[name]) for name in lists} for row in rows]


def _csv_options(datasets: Any, file: Path, columns: Sequence[str], header: bool) -> Row:
    """Every column as text: else a choice "12.50" is read as a number, and "None" as nothing."""
    names = list(columns)
    if header:
        with file.open(encoding="utf-8", newline="") as lines:
            names = next(csv.reader(lines), [])
    features = datasets.Features({name: datasets.Value("string") for name in names})
    options: Row = {"features": features, "keep_default_na": False}
    return options if header else options | {"names": names, "header": None}


def hub_rows(name: str, config: str, split: str, columns: Sequence[str]) -> list[Row]:
    """The rows of a data set of the Hugging Face hub."""
    datasets = import_datasets(name)
    found = datasets.load_dataset(name, config, split=split)
    return checked(list(found), columns, f"{name} {config} {split}")


def checked(rows: list[Row], columns: Sequence[str], source: str) -> list[Row]:
    """`rows`, if there are any and they have the columns; else ValueError."""
    have = sorted(rows[0]) if rows else []
    if not set(columns) <= set(have):
        raise ValueError(f"expected columns {', '.join(columns)} in {source}, got {have}")
    return rows


def sample(rows: list[Row], request: Request, name: str) -> list[tuple[int, Row]]:
    """`request.contexts` rows (all, if there are fewer) with their numbers, drawn by the seed."""
    chosen = random.Random(f"{name} {request.seed}").sample(
        range(len(rows)), min(request.contexts, len(rows))
    )
    return [(i, rows[i]) for i in sorted(chosen)]


def room(tokenizer: Any, length: int | None) -> int | None:
    """Tokens of prompt and answer: `length`, or what the tokenizer says, or None for no limit."""
    limit = length if length is not None else tokenizer.model_max_length
    return None if limit > _LONGEST else int(limit)


def without_middle(ids: Sequence[int], most: int | None, name: str) -> tuple[int, ...]:
    """The first and last `most` / 2 ids, as LongBench shortens: both ends tell what to do.

    Raises:
        ValueError: no token would be left.
    """
    if most is None or len(ids) <= most:
        return tuple(ids)
    if most < 2:
        raise ValueError(f"expected room for a context of {name}, got {most} tokens")
    half = most // 2
    return (*ids[: most - half], *ids[len(ids) - half :])
