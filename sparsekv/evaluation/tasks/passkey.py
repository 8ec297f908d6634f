"""Pass key: five digits in prose, stated twice, asked for once.

Over the contexts the depths are stratified: with depths at random a window keeps the key in .08 or
.33 of the contexts, depending on the seed.
"""

from __future__ import annotations

import random

from sparsekv.evaluation.example import Example, Question, Request, Task
from sparsekv.evaluation.texts import PROSE, encode, insert, opening, passages, strata

_HEAD = (
    "There is important information hidden within the following text. Find it and memorize it.\n\n"
)
_FACT = " The pass key is {0}. Remember it. {0} is the pass key."
_ASK = "\n\nQuestion: What is the pass key?\nAnswer: The pass key is"


def passkey(request: Request, tokens: int) -> Task:
    """Contexts of `tokens` tokens with one key each."""
    rng = random.Random(f"passkey {tokens} {request.seed}")
    tokenizer = request.tokenizer
    depths = strata(request.contexts, rng)
    rng.shuffle(depths)
    head, ask = opening(tokenizer, _HEAD), tuple(encode(tokenizer, _ASK))
    examples = []
    for i, ids in enumerate(passages(request, PROSE, tokens, rng)):
        key = str(rng.randrange(10_000, 100_000))
        fact = encode(tokenizer, _FACT.format(key))
        text = insert(tokenizer, ids[: tokens - len(head) - len(fact)], [fact], [depths[i]])
        question = Question("key", ask, (tuple(encode(tokenizer, f" {key}")),))
        examples.append(Example(str(i), tuple(head + text), (question,)))
    return Task(f"passkey-{tokens // 1024}k", "forced", "em", tuple(examples))
