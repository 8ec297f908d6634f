"""Every policy of the contract, small enough for tiny prompts, and what each is said to do.

`SUPPORT` is what the tests hold the library to: in each row a policy is "right" (it equals the
reference, or itself without the feature) or "refused" (a ValueError "expected .., got .."). The
table of the documentation is made from it:

    PYTHONPATH=tests python tests/zoo.py > docs/support.md
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from reference import Reference
from reference.pruned import PrunedReference
from torch import Tensor

from sparsekv.policies import POLICIES

NAMES = (
    "full", "streaming", "h2o", "snapkv", "pyramid", "layersplit", "knorm", "random", "tova",
    "scissorhands", "keyformer", "adakv", "criticalkv", "chunked", "expected", "keydiff", "rkv",
    "duo", "quest", "kvzip", "pyramidinfer", "planned",
)  # fmt: skip

FEATURES = {
    "loop": "a manual loop, model(ids, past_key_values=cache)",
    "padding": "rows of different lengths in one batch, padded on the left",
    "chunked": "generate(prefill_chunk_size=...)",
    "turns": "a second generate() on the same cache",
    "beams": "beam search",
    "drafts": "assisted decoding, prompt lookup, crop()",
    "swaps": "rows of the cache that change places",
    "deferred": "generate(prefill_chunk_size=...) with defer_eviction: as one forward",
    "quantised": "kv_dtype",
}

_EVERYTHING = dict.fromkeys(FEATURES, "right")
SUPPORT: dict[str, dict[str, str]] = {
    **dict.fromkeys(NAMES, _EVERYTHING),
    # Its prompt is cut block by block, so that nothing is left to defer.
    "keydiff": {**_EVERYTHING, "deferred": "refused"},
    # Decided after extra passes, which only generate() runs.
    "kvzip": {**_EVERYTHING, "loop": "refused", "drafts": "refused", "swaps": "refused"},
    # The tail is that of the whole prompt, and rows of a batch would drop different tokens.
    "pyramidinfer": {
        **_EVERYTHING, "padding": "refused", "chunked": "refused", "turns": "refused",
        "beams": "refused", "drafts": "refused", "deferred": "refused",
    },
}  # fmt: skip

# One set of keys for all heads of a layer or model needs what other ranks know; gates and noise are
# numbered by heads of the whole layer.
TENSOR_PARALLEL = {
    **dict.fromkeys(NAMES, "local"),
    **dict.fromkeys(
        ("tova", "chunked", "kvzip", "pyramidinfer", "duo", "keyformer", "planned"), "refused"
    ),
}

# Wrapper -> scorer -> may it be wrapped; a scorer that drops tokens at every step has no score of
# its own to give, and CriticalKV multiplies scores, so they must not be negative.
WRAPPERS = ("adakv", "criticalkv", "critical-ada", "chunked")
SCORERS = {
    "snapkv": "right", "pyramid": "right", "expected": "right", "random": "right",
    "knorm": "right", "h2o": "refused", "tova": "refused", "streaming": "refused",
    "layersplit": "refused", "planned": "right",
}  # fmt: skip


def _heads(query_heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": 16 * query_heads,
    }


# Configurations of `rig.tiny_llama`: queries a KV head.
GROUPS = {
    "mha": _heads(4, 4),
    "group-3": _heads(6, 2),
    "group-4": _heads(8, 2),
    "group-8": _heads(16, 2),
    "mqa": _heads(4, 1),
}


class CharTokenizer:
    """As much of a tokenizer as a policy may want: one id a character, 2 .. 127."""

    chat_template = "yes"

    def apply_chat_template(self, turn: list[dict[str, str]], **kwargs: Any) -> str:
        """The end of the turn stands in no context of the tests: passes are found by their end."""
        return turn[0]["content"] + "###"

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        return [2 + ord(c) % 126 for c in text]

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}


def gates(layers: int, kv_heads: int) -> tuple[tuple[float, ...], ...]:
    """Different gates in [0, 1], in no order."""
    ranks = list(range(layers * kv_heads))
    random.Random(layers * kv_heads).shuffle(ranks)
    values = [rank / len(ranks) for rank in ranks]
    return tuple(tuple(values[l * kv_heads : (l + 1) * kv_heads]) for l in range(layers))


def _make(name: str, **fields: Any) -> Any:
    return POLICIES[name](**fields)


def _snap() -> Any:
    return _make("snapkv", window=4, kernel=3)


def shares(layers: int, kv_heads: int) -> tuple[tuple[int, ...], ...]:
    """Different shares, in no order; the first layer has none to give away."""
    drawn = random.Random(layers + 100 * kv_heads)
    rows = [tuple(drawn.randrange(20) for _ in range(kv_heads)) for _ in range(layers)]
    return ((25,) * kv_heads, *rows[1:])


def _planned(layers: int, kv_heads: int) -> Any:
    return _make("planned", scorer=_snap(), shares=shares(layers, kv_heads))


def _planned_layers(layers: int, kv_heads: int) -> Any:
    """Heads of a layer are equal: what wrappers take."""
    rows = tuple((3 * i + 1,) * kv_heads for i in range(layers))
    return _make("planned", scorer=_snap(), shares=rows)


def _duo(layers: int, kv_heads: int) -> Any:
    return _make("duo", gates=gates(layers, kv_heads), sinks=2, recent=6)


# Windows, chunks and intervals below the length of a test's prompt.
EXAMPLES: dict[str, Callable[[int, int], Any]] = {
    "full": lambda layers, heads: _make("full"),
    "streaming": lambda layers, heads: _make("streaming"),
    "h2o": lambda layers, heads: _make("h2o"),
    "snapkv": lambda layers, heads: _make("snapkv", window=8),
    "pyramid": lambda layers, heads: _make("pyramid", window=4, beta=4),
    "layersplit": lambda layers, heads: _make("layersplit", full_layers=1, window_rows=8),
    "knorm": lambda layers, heads: _make("knorm"),
    "random": lambda layers, heads: _make("random", seed=3),
    "tova": lambda layers, heads: _make("tova"),
    "scissorhands": lambda layers, heads: _make("scissorhands", window=10, recent=3),
    "keyformer": lambda layers, heads: _make("keyformer", tau_steps=10, seed=5),
    "adakv": lambda layers, heads: _make("adakv", scorer=_snap()),
    "criticalkv": lambda layers, heads: _make("criticalkv", scorer=_snap()),
    "chunked": lambda layers, heads: _make("chunked", scorer=_snap(), chunk=5),
    "expected": lambda layers, heads: _make("expected", future=16, epsilon=0.01),
    "keydiff": lambda layers, heads: _make("keydiff", block=8),
    "rkv": lambda layers, heads: _make("rkv", window=4, kernel=3, buffer=6),
    "duo": _duo,
    "quest": lambda layers, heads: _make("quest", dense_layers=1),
    "kvzip": lambda layers, heads: _make("kvzip", tokenizer=CharTokenizer(), chunk=16),
    "pyramidinfer": lambda layers, heads: _make(
        "pyramidinfer", decay=0.5, sinks=2, min_context=2, exceed=6
    ),
    "planned": _planned,
}


def example(name: str, layers: int = 3, kv_heads: int = 2) -> Any:
    """A small instance for a model of that shape; skips what the library does not have."""
    if name not in POLICIES:
        pytest.skip(f"sparsekv.POLICIES has no {name!r} yet")
    return EXAMPLES[name](layers, kv_heads)


def wrapped(wrapper: str, scorer: str, layers: int = 3, kv_heads: int = 2) -> Any:
    """A wrapper around a scorer for a model of that shape; skips what the library does not have."""
    for name in (*wrapper_names(wrapper), scorer):
        if name not in POLICIES:
            pytest.skip(f"sparsekv.POLICIES has no {name!r} yet")
    made = {"snapkv": lambda *_: _snap(), "planned": _planned_layers}
    inner = made.get(scorer, EXAMPLES[scorer])(layers, kv_heads)
    if scorer == "expected" and wrapper.startswith("critical"):  # values count once
        inner = _make("expected", future=16, value_norm=False)
    if wrapper == "critical-ada":
        return _make("criticalkv", scorer=_make("adakv", scorer=inner))
    more = {"chunk": 5} if wrapper == "chunked" else {}
    return _make(wrapper, scorer=inner, **more)


def wrapper_names(wrapper: str) -> tuple[str, ...]:
    """The policies that a row of the table is made of."""
    return ("criticalkv", "adakv") if wrapper == "critical-ada" else (wrapper,)


def may_wrap(wrapper: str, scorer: str) -> str:
    """ "right" or "refused"."""
    negative = scorer == "knorm" and wrapper.startswith("critical")
    return "refused" if negative else SCORERS[scorer]


def truth(model: Any, policy: Any, budget: int | float, **options: Any) -> Any:
    """The reference of a policy; options of `Reference`."""
    if policy.name == "pyramidinfer":
        return PrunedReference(model, policy, policy.decay)
    return Reference(model, policy, budget, **options)


def check(reference: Any, loop: Any, ids: Tensor, last_only: bool = False) -> Tensor:
    """Feed both, compare logits and kept sets, return the greedy token [1, 1].

    last_only: compare the last row of logits alone; the others may have been pruned.
    """
    expected, got = reference.feed(ids), loop.feed(ids)[0]
    if last_only:
        expected, got = expected[-1:], got[-1:]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert loop.kept() == reference.kept()
    return expected[-1:].argmax(-1, keepdim=True)


def support_page() -> str:
    """`SUPPORT` of the policies that the library has, as the Markdown of docs/support.md."""
    sign = {"right": "✓", "refused": "–"}
    rows = [["policy", *FEATURES, "tensor parallel"], ["---"] * (2 + len(FEATURES))]
    for name in (name for name in POLICIES if name in SUPPORT):
        row = [sign[SUPPORT[name][feature]] for feature in FEATURES]
        parallel = {"local": "✓", "refused": "–"}[TENSOR_PARALLEL[name]]
        rows.append([f"[`{name}`](policies.md#{name})", *row, parallel])
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    words = "".join(f"- {name}: {text}\n" for name, text in FEATURES.items())
    return f"{_PAGE_HEAD}\n{table}\n{words}- {_PARALLEL}\n"


_PAGE_HEAD = """# What works with what

Written by `PYTHONPATH=tests python tests/zoo.py` from the table that the tests hold the library to.

✓ is right: every token, every kept key and the logits are those of an independent evictor (a dense
cache, an explicit mask, float64), or of the same rows without the feature. – is refused: a
`ValueError` that says why. Nothing is in between.
"""
_PARALLEL = (
    "tensor parallel: a model that transformers shards by `tp_plan`; each rank evicts for its heads"
)


@contextmanager
def held_to(how: str) -> Iterator[None]:
    """What is "refused" has to raise a ValueError that names what was expected and what it got."""
    if how == "refused":
        with pytest.raises(ValueError, match=r"expected .*, got "):
            yield
    else:
        yield


if __name__ == "__main__":
    print(support_page(), end="")
