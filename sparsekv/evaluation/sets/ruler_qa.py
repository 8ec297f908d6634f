"""RULER's question tasks as published text: `rulerqa-1-4k` (SQuAD), `rulerqa-2-4k` (HotpotQA).

Rows come from `DATA/rulerqa/4096.jsonl` (.parquet, .csv) if the data folder has `rulerqa/`, else
from simonjegou/ruler on the hub, configurations 4096, 8192 and 16384, which RULER's own program
made. Columns: context, question, answer_prefix, answer, task. Their length is in tokens of the
tokenizer that they were made with; nothing is cut here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sparsekv.evaluation.example import Example, Question, Request, Task
from sparsekv.evaluation.ruler.fitting import encode
from sparsekv.evaluation.scores import string_match_part
from sparsekv.evaluation.sets.loading import hub_rows, local_folder, local_rows, sample

HUB = "simonjegou/ruler"
COLUMNS = ("context", "question", "answer_prefix", "answer", "task")
_NEW_TOKENS = 32
_NAME = re.compile(r"rulerqa-(?P<set>[12])-(?P<length>\d+)k")


@dataclass(frozen=True)
class RulerQATask:
    """The builder of one set (1 or 2) at one length."""

    number: int
    length: int
    name: str

    def __call__(self, request: Request) -> Task:
        """The task; see `Builder`.

        Raises:
            ValueError: `datasets` or rows that are missing.
            OSError: a hub that cannot be reached.
        """
        folder = local_folder(request.data, "rulerqa")
        if folder is not None:
            rows = local_rows(folder, str(self.length), COLUMNS, lists=("answer",))
        else:
            rows = hub_rows(HUB, str(self.length), "test", COLUMNS)
        rows = [row for row in rows if row["task"] == f"qa_{self.number}"]
        if not rows:
            raise ValueError(f"expected rows of task qa_{self.number} for {self.name}, got none")
        tokenizer, examples = request.tokenizer, []
        for number, row in sample(rows, request, self.name):
            context = encode(tokenizer, row["context"], first=True)
            asked = encode(tokenizer, row["question"] + row["answer_prefix"], first=False)
            question = Question("0", asked, references=tuple(row["answer"]))
            examples.append(Example(f"{self.name}/{number}", context, (question,)))
        return Task(
            self.name, "generated", string_match_part.__name__, tuple(examples), _NEW_TOKENS,
            string_match_part,
        )  # fmt: skip


def ruler_qa_builder(name: str) -> RulerQATask:
    """The builder of a name such as "rulerqa-1-4k"; ValueError for other names."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"expected rulerqa-1-LENGTH or rulerqa-2-LENGTH such as 4k, got {name!r}")
    return RulerQATask(int(match["set"]), int(match["length"]) * 1024, name)
