"""In-context learning: words of four kinds under arbitrary labels; the label of a new word.

Use it at budgets up to 256: with 512 a window alone equals a dense cache, and dense is no upper
bound, since fewer examples sometimes answer better.
"""

from __future__ import annotations

import random

from sparsekv.evaluation.example import Example, Question, Request, Task
from sparsekv.evaluation.texts import encode, opening

_SHOWN = "Input: {0}\nLabel: {1}"
_GAP = "\n\n"
_LABELS = ("Alpha", "Beta", "Gamma", "Delta")
_QUESTIONS = 8
_KINDS = tuple(
    tuple(words.split())
    for words in (
        "dog cat horse cow sheep goat pig lion tiger bear wolf fox rabbit mouse monkey elephant "
        "giraffe zebra camel deer whale dolphin shark eagle duck goose frog snake turtle bee",
        "bread cheese apple banana rice pasta soup salad butter cake pizza sandwich chicken egg "
        "potato tomato carrot onion cherry grape lemon sugar honey yogurt cookie bacon steak "
        "corn bean mushroom",
        "shirt hat coat shoe sock glove scarf jacket dress skirt belt boot sweater jeans tie "
        "suit vest cap sandal apron robe uniform pajamas blouse shorts mitten slipper cloak "
        "bonnet hood",
        "car bus train bicycle truck airplane boat ship helicopter motorcycle van taxi tractor "
        "scooter submarine rocket wagon tram ferry canoe ambulance yacht jeep sled carriage "
        "limousine trolley glider raft cart",
        "red blue green yellow purple orange pink brown black white gray violet crimson scarlet "
        "turquoise beige maroon navy teal gold silver indigo magenta cyan olive tan ivory "
        "lavender khaki amber",
        "doctor teacher nurse lawyer farmer baker pilot sailor soldier painter writer singer "
        "actor dancer plumber carpenter mechanic engineer chef waiter butcher tailor judge "
        "dentist barber miner librarian journalist cashier janitor",
        "piano guitar violin drum flute trumpet harp cello clarinet saxophone banjo organ "
        "trombone tuba harmonica oboe accordion ukulele bassoon mandolin fiddle xylophone "
        "tambourine bugle lute bagpipe viola cymbal horn keyboard",
        "France Spain Italy Germany Japan China India Brazil Mexico Canada Egypt Kenya Russia "
        "Greece Turkey Norway Sweden Poland Peru Chile Cuba Iran Iraq Vietnam Thailand Portugal "
        "Ireland Austria Denmark Finland",
    )
)


def icl(request: Request, tokens: int) -> Task:
    """Contexts of as many examples as fit in `tokens` tokens, kinds mixed, two questions a kind."""
    rng = random.Random(f"icl {tokens} {request.seed}")
    examples = [_example(request, str(i), tokens, rng) for i in range(request.contexts)]
    return Task(f"icl-{tokens // 1024}k", "forced", "em", tuple(examples))


def _example(request: Request, name: str, tokens: int, rng: random.Random) -> Example:
    tokenizer = request.tokenizer
    kinds = [rng.sample(kind, len(kind)) for kind in rng.sample(_KINDS, len(_LABELS))]
    labels = rng.sample(_LABELS, len(_LABELS))
    each = _QUESTIONS // len(_LABELS)
    asked = [
        (word, label) for kind, label in zip(kinds, labels, strict=True) for word in kind[:each]
    ]
    shown = [
        (word, label) for kind, label in zip(kinds, labels, strict=True) for word in kind[each:]
    ]
    context = opening(tokenizer, "")
    first = True
    while True:
        for pair in rng.sample(shown, len(shown)):
            ids = encode(tokenizer, ("" if first else _GAP) + _SHOWN.format(*pair))
            if len(context) + len(ids) > tokens:
                return Example(name, tuple(context), _questions(tokenizer, asked))
            context, first = context + ids, False


def _questions(tokenizer: object, asked: list[tuple[str, str]]) -> tuple[Question, ...]:
    found = []
    for word, label in asked:
        prompt = encode(tokenizer, _GAP + _SHOWN.format(word, "").rstrip())
        found.append(Question(word, tuple(prompt), (tuple(encode(tokenizer, f" {label}")),)))
    return tuple(found)
