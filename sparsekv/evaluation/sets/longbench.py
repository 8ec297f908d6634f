"""LongBench (arXiv 2308.14508): `longbench-SUBSET`, or `longbench-SUBSET-8k` to cut contexts.

Rows come from `DATA/longbench/SUBSET.jsonl` (.parquet, .csv) if the data folder has `longbench/`,
else from the archive that its authors keep on the hub. Columns: input, context, answers,
all_classes. Contexts longer than the length, or than what the tokenizer says the model reads, lose
their middle. Texts may hold braces, so they are put in place of {input} and never formatted.
"""

from __future__ import annotations

import re
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub

from sparsekv.evaluation.example import Example, Question, Request, Task
from sparsekv.evaluation.ruler.fitting import encode
from sparsekv.evaluation.sets.loading import (
    Row,
    import_datasets,
    local_folder,
    local_rows,
    room,
    sample,
    without_middle,
)
from sparsekv.evaluation.sets.longbench_subsets import SUBSETS, Subset

HUB, ARCHIVE = "THUDM/LongBench", "data.zip"
COLUMNS = ("input", "context", "answers", "all_classes")
_NAME = re.compile(r"longbench-(?P<subset>[a-z0-9_]+(?:-p)?)(?:-(?P<length>\d+)(?P<unit>k?))?")


@dataclass(frozen=True)
class LongBenchTask:
    """The builder of one subset. length: tokens of prompt and answer, or None."""

    subset: str
    length: int | None
    name: str

    def __call__(self, request: Request) -> Task:
        """The task; see `Builder`.

        Raises:
            ValueError: `datasets` or rows that are missing, or no room for a context.
            OSError: a hub that cannot be reached.
        """
        subset = SUBSETS[self.subset]
        rows = self._rows(request)
        classes = tuple(rows[0]["all_classes"] or ()) if subset.classes else ()
        if subset.classes and not classes:
            raise ValueError(f"expected the classes of {self.subset} in all_classes, got none")
        examples = [
            self._example(subset, request, number, row)
            for number, row in sample(rows, request, self.name)
        ]
        headline, score = subset.scorer(classes)
        return Task(
            self.name, "generated", headline, tuple(examples), subset.new_tokens, score
        )  # fmt: skip

    def _rows(self, request: Request) -> list[Row]:
        folder = local_folder(request.data, "longbench")
        if folder is not None:
            return local_rows(folder, self.subset, COLUMNS, lists=("answers", "all_classes"))
        import_datasets(self.name)  # before anything is fetched
        archive = huggingface_hub.hf_hub_download(HUB, ARCHIVE, repo_type="dataset")
        with tempfile.TemporaryDirectory() as unpacked, zipfile.ZipFile(archive) as files:
            member = f"data/{self.subset}.jsonl"
            if member not in files.namelist():
                raise ValueError(f"expected {member} in {HUB} {ARCHIVE}, got {files.namelist()}")
            files.extract(member, unpacked)
            return local_rows(Path(unpacked) / "data", self.subset, COLUMNS)

    def _example(self, subset: Subset, request: Request, number: int, row: Row) -> Example:
        tokenizer = request.tokenizer
        asked = encode(tokenizer, subset.after.replace("{input}", row["input"]), first=False)
        most = room(tokenizer, self.length)
        if most is not None:
            most -= len(asked) + subset.new_tokens
        ids = encode(tokenizer, subset.before + row["context"], first=True)
        context = without_middle(ids, most, self.name)
        question = Question("0", asked, references=tuple(row["answers"]))
        return Example(f"{self.name}/{number}", context, (question,))


def longbench_builder(name: str) -> LongBenchTask:
    """The builder of a name such as "longbench-hotpotqa" or "longbench-repobench-p-16k".

    Raises:
        ValueError: no such subset.
    """
    match = _NAME.fullmatch(name)
    if match is None or match["subset"] not in SUBSETS:
        raise ValueError(
            f"expected longbench-SUBSET or longbench-SUBSET-8k with a SUBSET of "
            f"{', '.join(SUBSETS)}, got {name!r}"
        )
    length = int(match["length"]) * (1024 if match["unit"] else 1) if match["length"] else None
    return LongBenchTask(match["subset"], length, name)
