"""`sparsekv demo`: one question about one line in a long text, with a dense and a sparse cache.

The text is Python's own help, so it is there wherever Python is. Text, question and prompt format
were chosen, out of a few dozen tried, as one that SmolLM2-135M answers right with a dense cache and
with `pyramid` and `snapkv` at a budget of 512. A model this small gets most such questions wrong
either way: the demo shows that it works, not how often. It is not trivial, though: the text names
three PEPs, and with only the first and newest 512 tokens (`--policy streaming`), or without the
text, the answer is wrong.
"""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import sparsekv
from sparsekv.generation import Run, encode, generate_shown
from sparsekv.policies import Policy
from sparsekv.progress import spinning

TOPICS = ("import", "with")
QUESTION = "Which PEP contains the original proposal for the __future__ mechanism?"
ANSWER = "236"
MAX_NEW_TOKENS = 8


def prompt() -> str:
    """The text, then the question."""
    text = "\n\n".join(topics[name].strip() for name in TOPICS)
    return f"{text}\n\nQuestion: {QUESTION}\nAnswer: PEP"


def run_demo(
    model: Any, tokenizer: Any, policy: Policy, budget: int | float, kv_dtype: str | None = None
) -> None:
    """Answer with a dense cache, then with a sparse one; the last line printed compares them."""
    ids = encode(tokenizer, prompt(), chat=False)
    print(f"text: {ids.shape[1]} tokens of Python's own help ({', '.join(TOPICS)})")
    print(f"question: {QUESTION} Answer: PEP ...", flush=True)
    dense = generate_shown(model, tokenizer, ids, MAX_NEW_TOKENS, "dense")
    with spinning("checking the model"):
        sparsekv.patch(model, policy.with_tokenizer(tokenizer), budget, kv_dtype=kv_dtype)
    sparse = generate_shown(model, tokenizer, ids, MAX_NEW_TOKENS, policy.name)
    answers = f"dense answer: {_answer(dense)} · sparse answer: {_answer(sparse)}"
    print(f"{sparse.figures} · {answers}")


def _answer(run: Run) -> str:
    """The first line: a model that was not taught to stop goes on."""
    return (run.text.strip().splitlines() or [""])[0]
