"""Passage recall: 24 tokens of the context are quoted, the 48 that follow them are scored.

Graded, with little variance, on real text. The quotes of a context stand at stratified depths.
"""

from __future__ import annotations

import random

from sparsekv.evaluation.example import Example, Question, Request, Task
from sparsekv.evaluation.texts import CODE, PROSE, encode, opening, passages, strata

_ASK = "\n\n* * *\n\nLet us read that passage again: ..."
_CUE, _SCORED, _QUESTIONS = 24, 48, 8


def recall(request: Request, tokens: int, code: bool = False) -> Task:
    """Contexts of `tokens` tokens of prose or code, with eight quotes each."""
    name = f"recall-{'code-' if code else ''}{tokens // 1024}k"
    rng = random.Random(f"{name} {request.seed}")
    start = opening(request.tokenizer, "")
    ask = tuple(encode(request.tokenizer, _ASK))
    examples = []
    for i, ids in enumerate(passages(request, CODE if code else PROSE, tokens - len(start), rng)):
        last = len(ids) - _CUE - _SCORED
        questions = []
        for j, depth in enumerate(strata(_QUESTIONS, rng)):
            cut = int(depth * last) + _CUE
            answer = tuple(ids[cut : cut + _SCORED])
            questions.append(Question(str(j), ask + tuple(ids[cut - _CUE : cut]), (answer,)))
        examples.append(Example(str(i), tuple(start + ids), tuple(questions)))
    return Task(name, "forced", "acc", tuple(examples))
