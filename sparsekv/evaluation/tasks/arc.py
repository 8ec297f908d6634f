"""ARC-easy with forty worked questions before it: a control.

Evicting worked questions hardly changes what the model knows, so whatever drops here is damage.
"""

from __future__ import annotations

import json
import random
from typing import Any

from sparsekv.evaluation.example import Example, Question, Request, Task
from sparsekv.evaluation.texts import data_file, encode, opening

_SHOTS = 40
# Questions of a context, so that 93 contexts ask nearly all of the 2376.
_QUESTIONS = 25


def arc_easy(request: Request) -> Task:
    """Contexts of forty questions with their answers; no question is asked twice.

    Raises:
        ValueError: more contexts than there are questions for.
    """
    rng = random.Random(f"arc-easy {request.seed}")
    file = data_file(request, "mc/arc_easy.test.jsonl", "arc-easy")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
    if request.contexts * _QUESTIONS > len(rows) - _SHOTS:
        most = (len(rows) - _SHOTS) // _QUESTIONS
        raise ValueError(f"expected at most {most} contexts of arc-easy, got {request.contexts}")
    rng.shuffle(rows)
    tokenizer = request.tokenizer
    examples = []
    for i in range(request.contexts):
        asked = rows[i * _QUESTIONS : (i + 1) * _QUESTIONS]
        others = rows[: i * _QUESTIONS] + rows[(i + 1) * _QUESTIONS :]
        shots = "\n\n".join(f"{_ask(row)} {_right(row)}" for row in rng.sample(others, _SHOTS))
        questions = tuple(_question(tokenizer, row) for row in asked)
        examples.append(Example(str(i), tuple(opening(tokenizer, shots)), questions))
    return Task("arc-easy", "choice", "mc", tuple(examples), control=True)


def _ask(row: dict[str, Any]) -> str:
    return f"Question: {row['question'].strip()}\nAnswer:"


def _right(row: dict[str, Any]) -> str:
    return row["choices"][row["labels"].index(row["answer"])].strip()


def _question(tokenizer: Any, row: dict[str, Any]) -> Question:
    prompt = encode(tokenizer, f"\n\n{_ask(row)}")
    answers = tuple(tuple(encode(tokenizer, f" {choice.strip()}")) for choice in row["choices"])
    return Question(row["id"], tuple(prompt), answers, row["labels"].index(row["answer"]))
