"""A data folder and a tokenizer small enough for tests, made of drawn words."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]


def vocabulary(count: int, rng: Random) -> list[str]:
    """Distinct words of four to twelve letters."""
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 6)))] = None
    return list(words)


def sentences(words: list[str], count: int, rng: Random) -> str:
    """Sentences of five to twelve words, some after an empty line."""
    made = []
    for _ in range(count):
        chosen = rng.choices(words, k=rng.randint(5, 12))
        end = rng.choice([". ", "? ", "! ", ".” ", ".\n\n"])
        made.append(f"{chosen[0].title()} {' '.join(chosen[1:])}{end}")
    return "".join(made)


def write_data(folder: Path, seed: int = 0) -> Path:
    """prose/ with two books, qa/ with XQuAD's and Natural Questions' files."""
    rng = Random(seed)
    words = vocabulary(4000, rng)
    for name in ("prose", "qa"):
        (folder / name).mkdir(parents=True)
    for name in ("one", "two"):
        text = sentences(words, 2500, rng)
        (folder / "prose" / f"{name}.txt").write_text(text, encoding="utf-8")
    articles = [{"paragraphs": [_paragraph(words, rng, n) for n in range(4)]} for _ in range(30)]
    (folder / "qa" / "xquad.en.json").write_text(json.dumps({"data": articles}), encoding="utf-8")
    lines = [json.dumps(_passage(words, rng, n)) for n in range(200)]
    (folder / "qa" / "nq-open-oracle.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def _paragraph(words: list[str], rng: Random, number: int) -> dict[str, Any]:
    text = f"{sentences(words, 6, rng)}And {words[0]}" if number == 0 else ""
    text = text or sentences(words, 6, rng).strip()
    # The second answer is too short to be asked for; the third stands in many paragraphs.
    answers = [text.split()[3], "Zu", *([words[0]] if number == 0 else [])]
    qas = [
        {
            "id": f"{number}{i}",
            "question": f"Why {number}{i}?",
            "answers": [{"text": a, "answer_start": 0}],
        }
        for i, a in enumerate(answers)
    ]
    return {"context": text, "qas": qas}


def _passage(words: list[str], rng: Random, number: int) -> dict[str, Any]:
    text = sentences(words, 5, rng).strip()
    answer = text.split()[2] if number % 5 else "nowhere to be found"
    return {"question": f"who is {number}", "answers": [answer], "title": "", "passage": text}


def train_tokenizer(data: Path, size: int = 3000) -> PreTrainedTokenizerFast:
    """A byte-level BPE over the prose, with <s> in front of what it opens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(file) for file in sorted((data / "prose").glob("*.txt"))], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
