"""MMLU (arXiv 2009.03300), five examples of the subject in the context: `mmlu`, `mmlu-anatomy`.

A context is a subject's five examples; up to `QUESTIONS` questions of the subject are asked about
it, and the answer is the likeliest of " A", " B", " C" and " D". The question itself is never
compressed away under the question-agnostic protocol, so what is tested there is whether a model
still knows what to do; dense scores are MMLU's.

Rows come from `DATA/mmlu/` if the data folder has it, else from cais/mmlu on the hub. Local files
are those of the authors, dev/SUBJECT_dev.csv and test/SUBJECT_test.csv without a header (question,
four choices, letter), or dev and test (.jsonl, .parquet, .csv) with the hub's columns: question,
subject, choices, answer (0 to 3).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsekv.evaluation.example import Example, Question, Request, Task
from sparsekv.evaluation.ruler.fitting import encode
from sparsekv.evaluation.sets.loading import Row, hub_rows, local_folder, local_rows

HUB, SHOTS, QUESTIONS = "cais/mmlu", 5, 20
LETTERS = "ABCD"
COLUMNS = ("question", "subject", "choices", "answer")
_CSV_COLUMNS = ("question", *LETTERS, "letter")


@dataclass(frozen=True)
class MMLUTask:
    """The builder of one subject, or of all if `subject` is None."""

    subject: str | None

    @property
    def name(self) -> str:
        """As users type it."""
        return "mmlu" if self.subject is None else f"mmlu-{self.subject}"

    def __call__(self, request: Request) -> Task:
        """The task; see `Builder`. contexts: subjects, then further questions of them.

        Raises:
            ValueError: `datasets` or rows that are missing, or a subject that is not there.
            OSError: a hub that cannot be reached.
        """
        shots = _by_subject(self._rows(request, "dev"))
        tests = _by_subject(self._rows(request, "test"))
        subjects = sorted(tests) if self.subject is None else [self.subject]
        missing = [s for s in subjects if len(shots.get(s, ())) < SHOTS or not tests.get(s)]
        if missing:
            raise ValueError(
                f"expected {SHOTS} examples and a question of {missing[0]}, got "
                f"{len(shots.get(missing[0], ()))} and {len(tests.get(missing[0], ()))}"
            )
        rng = random.Random(f"{self.name} {request.seed}")
        rng.shuffle(subjects)
        order = {s: rng.sample(range(len(tests[s])), len(tests[s])) for s in subjects}
        blocks = [
            (s, order[s][start : start + QUESTIONS])
            for start in range(0, max(len(rows) for rows in tests.values()), QUESTIONS)
            for s in subjects
            if start < len(order[s])
        ]
        examples = [
            _example(request, s, shots[s][:SHOTS], [(i, tests[s][i]) for i in block])
            for s, block in blocks[: request.contexts]
        ]
        return Task(self.name, "choice", "mc", tuple(examples))

    def _rows(self, request: Request, split: str) -> list[Row]:
        folder = local_folder(request.data, "mmlu")
        if folder is None:
            return hub_rows(HUB, self.subject or "all", split, COLUMNS)
        if not (folder / split).is_dir():
            rows = local_rows(folder, split, COLUMNS, lists=("choices",))
            return [row for row in rows if self.subject in (None, row["subject"])]
        files = sorted((folder / split).glob(f"{self.subject or '*'}_{split}.csv"))
        return [row for file in files for row in _authors_rows(file, split)]


def _authors_rows(file: Path, split: str) -> list[Row]:
    subject = file.stem.removesuffix(f"_{split}")
    rows = local_rows(file.parent, file.stem, _CSV_COLUMNS, header=False)
    return [
        {
            "question": row["question"],
            "subject": subject,
            "choices": [row[letter] for letter in LETTERS],
            "answer": LETTERS.index(row["letter"].strip()),
        }
        for row in rows
    ]


def _by_subject(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["subject"], []).append(row)
    return found


def _example(
    request: Request, subject: str, shots: Sequence[Row], tests: Sequence[tuple[int, Row]]
) -> Example:
    tokenizer, title = request.tokenizer, subject.replace("_", " ")
    solved = "\n\n".join(f"{_posed(row)} {LETTERS[int(row['answer'])]}" for row in shots)
    opening = f"Multiple choice questions about {title}, with their answers.\n\n{solved}"
    choices = tuple(encode(tokenizer, f" {letter}", first=False) for letter in LETTERS)
    questions = [
        Question(
            str(i),
            encode(tokenizer, f"\n\n{_posed(row)}", first=False),
            choices,
            int(row["answer"]),
        )
        for i, row in tests
    ]
    context = encode(tokenizer, opening, first=True)
    return Example(f"mmlu/{subject}/{tests[0][0]}", context, tuple(questions))


def _posed(row: Row) -> str:
    listed = (f"{letter}. {c}" for letter, c in zip(LETTERS, row["choices"], strict=True))
    return "\n".join([str(row["question"]).strip(), *listed, "Answer:"])


def mmlu_builder(name: str) -> MMLUTask:
    """The builder of "mmlu", or of a subject by MMLU's own name, "mmlu-high_school_physics".

    Raises:
        ValueError: another name.
    """
    head, _, subject = name.partition("-")
    if head != "mmlu" or name == "mmlu-":
        raise ValueError(f"expected mmlu or mmlu-SUBJECT, got {name!r}")
    return MMLUTask(subject or None)
