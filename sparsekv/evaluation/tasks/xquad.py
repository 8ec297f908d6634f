"""XQuAD, open book: paragraphs of Wikipedia, four worked questions about them, then one more.

Scored by the tokens of the span that the annotators chose, so accuracy is a share of tokens.
"""

from __future__ import annotations

import json
import random
from typing import Any

from sparsekv.evaluation.example import Example, Question, Request, Task
from sparsekv.evaluation.texts import data_file, encode, opening

_HEAD = "Read the following passages, then answer the questions with a short span of the text.\n\n"
_DEMOS, _QUESTIONS = 4, 7
_Asked = tuple[str, str, str]  # id, question, answer


def xquad(request: Request, tokens: int) -> Task:
    """Contexts of as many whole paragraphs as fit in `tokens` tokens, with seven questions each.

    Raises:
        ValueError: no data, or paragraphs too long in this tokenizer's tokens to leave a question.
    """
    rng = random.Random(f"xquad {tokens} {request.seed}")
    tokenizer = request.tokenizer
    head = opening(tokenizer, _HEAD)
    paragraphs = _paragraphs(request)
    waiting: list[int] = []
    examples = []
    for i in range(request.contexts):
        context, asked = list(head), []
        while not waiting or len(context) + len(paragraphs[waiting[-1]][0]) <= tokens:
            if not waiting:  # another round over all paragraphs
                waiting = rng.sample(range(len(paragraphs)), len(paragraphs))
            ids, questions = paragraphs[waiting.pop()]
            context += ids
            asked.append(rng.sample(questions, len(questions)))
        examples.append(Example(str(i), tuple(context[:tokens]), _questions(tokenizer, asked, rng)))
    return Task(f"xquad-{tokens // 1024}k", "forced", "acc", tuple(examples))


def _paragraphs(request: Request) -> list[tuple[list[int], list[_Asked]]]:
    """(token ids, its questions) of every paragraph, with at least one question."""
    file = data_file(request, "qa/xquad.en.json", "xquad")
    found = []
    articles: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["data"]
    for article in articles:
        for paragraph in article["paragraphs"]:
            ids = encode(request.tokenizer, paragraph["context"].strip() + "\n\n")
            asked = [
                (qa["id"], qa["question"].strip(), qa["answers"][0]["text"].strip())
                for qa in paragraph["qas"]
            ]
            found.append((ids, asked))
    return found


def _questions(
    tokenizer: Any, asked: list[list[_Asked]], rng: random.Random
) -> tuple[Question, ...]:
    """Demonstrations and questions take turns at the paragraphs, so that all depths are asked."""
    rng.shuffle(asked)
    depth = max(map(len, asked), default=0)
    every = [questions[i] for i in range(depth) for questions in asked if i < len(questions)]
    every = list(dict.fromkeys(every))  # where a round ends, a context may hold a paragraph twice
    demos, rest = every[:_DEMOS], every[_DEMOS : _DEMOS + _QUESTIONS]
    if not rest:
        raise ValueError(
            f"expected paragraphs with more than {_DEMOS} questions in a context, got {len(every)}:"
            " this tokenizer makes too many tokens of them"
        )
    shown = "".join(f"\n\nQuestion: {question}\nAnswer: {answer}" for _, question, answer in demos)
    found = []
    for key, question, answer in rest:
        prompt = encode(tokenizer, f"{shown}\n\nQuestion: {question}\nAnswer:".lstrip("\n"))
        found.append(Question(key, tuple(prompt), (tuple(encode(tokenizer, f" {answer}")),)))
    return tuple(found)
