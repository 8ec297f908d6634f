"""Language modelling behind a compressed context: the NLL of the next 256 tokens.

No prompt format to choose. What counts is the paired difference to a dense cache, in nats a token.
The question is the context's next token: both protocols compress the same text.
"""

from __future__ import annotations

import random

from sparsekv.evaluation.example import Example, Question, Request, Task
from sparsekv.evaluation.texts import CODE, PROSE, opening, passages

_SCORED = 256


def lm(request: Request, tokens: int, code: bool = False) -> Task:
    """Contexts of `tokens` tokens of prose or code."""
    name = f"lm-{'code' if code else 'prose'}-{tokens // 1024}k"
    rng = random.Random(f"{name} {request.seed}")
    start = opening(request.tokenizer, "")
    context = tokens - len(start)
    examples = []
    for i, ids in enumerate(passages(request, CODE if code else PROSE, context + 1 + _SCORED, rng)):
        question = Question("next", tuple(ids[context : context + 1]), (tuple(ids[context + 1 :]),))
        examples.append(Example(str(i), tuple(start + ids[:context]), (question,)))
    return Task(name, "forced", "nll", tuple(examples))
