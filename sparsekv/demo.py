"""`sparsekv demo`: one question about one sentence in a long text, dense and sparse."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import sparsekv
from sparsekv.generation import encode, generate_shown
from sparsekv.policies import Policy
from sparsekv.progress import spinning

TOPICS = ("import", "with")
QUESTION = "Which PEP contains the original proposal for the __future__ mechanism?"
ANSWER = "236"
MAX_NEW_TOKENS = 12


def prompt() -> str:
    """The text, then the question."""
    text = "\n\n".join(topics[name].strip() for name in TOPICS)
    return f"{text}\n\nQuestion: {QUESTION}\nAnswer: PEP"


def run(model: Any, tokenizer: Any, policy: Policy, budget: int | float) -> None:
    """Answer with a dense cache, then with a sparse one; the last line printed compares them."""
    ids = encode(tokenizer, prompt(), chat=False)
    print(f"text: {ids.shape[1]} tokens of Python's own help ({', '.join(TOPICS)})")
    print(f"question: {QUESTION}")
    dense = generate_shown(model, tokenizer, ids, MAX_NEW_TOKENS, "dense")
    with spinning("checking the model"):
        sparsekv.patch(model, policy, budget)
    sparse = generate_shown(model, tokenizer, ids, MAX_NEW_TOKENS, policy.name)
    print(f"{sparse.figures} · dense answer: {dense.line} · sparse answer: {sparse.line}")
