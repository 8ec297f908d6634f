"""What the tests of the evaluation share: a tiny model with its tokenizer, made-up tasks, data."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sparsekv.evaluation.example import Example, Question, Task


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A user's model folder: 2 layers, 4 query and 2 KV heads, every byte a token."""
    return save_tiny_model(
        tmp_path_factory.mktemp("model"), initializer_range=0.2, max_position_embeddings=8192
    )


@pytest.fixture
def subject(folder) -> tuple[PreTrainedModel, Any]:
    """(model in fp32, tokenizer)."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """A folder laid out as the real one, with made-up texts."""
    rng, root = random.Random(0), tmp_path_factory.mktemp("data")
    words = [w + e for w in ("ba", "do", "ki", "lu", "mo", "ne") for e in ("", "na", "ra", "tis")]
    for kind, count in (("prose", 3), ("code", 2)):
        (root / kind).mkdir()
        for i in range(count):
            sentences = (" ".join(rng.choices(words, k=7)).capitalize() for _ in range(1500))
            lines = (f"{text}.{'' if j % 5 else chr(10) * 2}" for j, text in enumerate(sentences))
            (root / kind / f"{i}.txt").write_text(" ".join(lines))
    for name in ("qa", "mc"):
        (root / name).mkdir()
    paragraphs = [_paragraph(i, rng, words) for i in range(20)]
    (root / "qa/xquad.en.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    rows = [json.dumps(_choice(i, rng, words)) for i in range(200)]
    (root / "mc/arc_easy.test.jsonl").write_text("\n".join(rows) + "\n")
    return root


def _paragraph(number: int, rng: random.Random, words: list[str]) -> dict[str, Any]:
    text = " ".join(rng.choices(words, k=30))
    asked = [
        {"id": f"{number}-{i}", "question": f"Which {i}?", "answers": [{"text": words[i]}]}
        for i in range(5)
    ]
    return {"context": text, "qas": asked}


def _choice(number: int, rng: random.Random, words: list[str]) -> dict[str, Any]:
    choices = rng.sample(words, 4)
    about = {"id": f"q{number}", "question": f"What {number}?", "choices": choices}
    return about | {"labels": ["A", "B", "C", "D"], "answer": rng.choice("ABCD")}


def made_up(
    kind: str = "forced", seed: int = 0, contexts: int = 3, shortest: int = 2, common: int = 0
) -> Task:
    """Contexts of 24 to 60 tokens, each with three questions of `shortest` tokens or more.

    common: tokens that all questions of a context begin with.

    No id twice in a text: keys of one token have one norm, and rounding would rank them.
    """
    rng = random.Random(seed)
    examples = []
    for i in range(contexts):
        ids = rng.sample(range(250), 120 + common)
        context, rest = ids[: 24 + 12 * i], ids[60:120]
        questions = []
        for j in range(3):
            prompt = ids[120:] + rest[10 * j : 10 * j + shortest + j]
            answers = [rest[40 + 3 * k : 42 + 3 * k + (j + k) % 2] for k in range(4)]
            if kind != "choice":
                answers = answers[:1] if kind == "forced" else []
            found = tuple(map(tuple, answers))
            questions.append(Question(f"q{j}", tuple(prompt), found, j, ("x",)))
        examples.append(Example(f"e{i}", tuple(context), tuple(questions)))
    score = (lambda text, references: float(len(text))) if kind == "generated" else None
    headline = {"forced": "em", "choice": "mc", "generated": "length"}[kind]
    return Task(f"made-up-{kind}", kind, headline, tuple(examples), 6, score)  # type: ignore[arg-type]
