"""Needles: magic words in prose, asked for one by one.

Plain completion with two worked questions about other words of the same text. Each word is stated
twice on a line of its own; the lines stand at stratified depths.
"""

from __future__ import annotations

import random

from sparsekv.evaluation.example import Example, Question, Request, Task
from sparsekv.evaluation.texts import PROSE, encode, insert, opening, passages, strata

_HEAD = (
    "Some special magic words are hidden within the following text. Make sure to memorize them.\n\n"
)
_FACT = (
    "\nThe special magic word for {0} is {1}. Remember it: the special magic word for {0} is {1}.\n"
)
_ASK = (
    "\n\nQuestion: What is the special magic word for {0}?"
    "\nAnswer: The special magic word for {0} is"
)
_DEMOS = 2
# Stuffs and colours ("iron gate", "blue gate") would be taken for the magic word itself.
_QUALITIES, _THINGS, _WORDS = (
    tuple(words.split())
    for words in (
        "ancient broken gentle hidden lonely modern narrow open plain quiet rapid rusty secret "
        "simple tiny upper vast warm wide young busy clever dusty empty",
        "anchor bell chest drum engine flag gate hammer island jar kettle ladder mirror needle "
        "oven pillow quilt ring saddle tower urn vase wheel yarn",
        "tiger river lemon rocket winter eagle rabbit ocean butter thunder pepper dragon piano "
        "desert turtle cherry pencil whale wolf honey coffee camel guitar planet",
    )
)


def needle(request: Request, tokens: int, keys: int) -> Task:
    """Contexts of `tokens` tokens with `keys` magic words, each of them asked for."""
    rng = random.Random(f"needle {tokens} {request.seed}")
    tokenizer = request.tokenizer
    drawn = [_facts(keys, rng) for _ in range(request.contexts)]
    head = opening(tokenizer, _HEAD)
    pieces = [[encode(tokenizer, _FACT.format(*fact)) for fact in facts] for facts in drawn]
    prose = passages(request, PROSE, tokens, rng)
    examples = []
    for i, (facts, facts_ids, ids) in enumerate(zip(drawn, pieces, prose, strict=True)):
        room = tokens - len(head) - sum(map(len, facts_ids))
        depths = strata(keys, rng)
        rng.shuffle(depths)
        text = insert(tokenizer, ids[:room], facts_ids, depths)
        questions = tuple(_question(tokenizer, facts, j) for j in range(keys))
        examples.append(Example(str(i), tuple(head + text), questions))
    return Task(f"needle-{tokens // 1024}k", "forced", "em", tuple(examples))


def _facts(keys: int, rng: random.Random) -> list[tuple[str, str]]:
    """(key, word), no quality, thing or word twice."""
    qualities, things = rng.sample(_QUALITIES, keys), rng.sample(_THINGS, keys)
    names = [f"{quality} {thing}" for quality, thing in zip(qualities, things, strict=True)]
    return list(zip(names, rng.sample(_WORDS, keys), strict=True))


def _question(tokenizer: object, facts: list[tuple[str, str]], which: int) -> Question:
    """The demonstrations are two of the other facts, which stand anywhere in the text."""
    demos = [facts[(which + 1 + j) % len(facts)] for j in range(_DEMOS)]
    text = "".join(f"{_ASK.format(key)} {word}." for key, word in demos)
    key, word = facts[which]
    prompt = encode(tokenizer, text + _ASK.format(key))
    return Question(key, tuple(prompt), (tuple(encode(tokenizer, f" {word}")),))
