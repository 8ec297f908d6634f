"""KVzip: what it asks the model to repeat, and which keys stay of all layers and heads."""

from __future__ import annotations

import pytest
import torch
from harness import golden_prefill, shape
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.policies import KVzip, LayerPlan
from sparsekv.probing import keep_best


class Words:
    """A tokenizer of one id a character, with or without a chat template."""

    def __init__(self, chat_template=None):
        self.chat_template = chat_template

    def __call__(self, text, add_special_tokens):
        assert add_special_tokens is False
        return {"input_ids": [1000 + ord(c) for c in text]}

    def apply_chat_template(self, turn, tokenize, add_generation_prompt):
        assert (tokenize, add_generation_prompt) == (False, True)
        return f"<user>{turn[0]['content']}</user><answer>"

    def ids(self, text):
        return self(text, add_special_tokens=False)["input_ids"]


def test_without_a_tokenizer_it_is_not_ready():
    with pytest.raises(ValueError, match=r"expected a tokenizer .* got None: KVzip\(tokenizer="):
        KVzip().ready()
    KVzip(tokenizer=Words()).ready()


@pytest.mark.parametrize("template", [None, "a template"])
@pytest.mark.parametrize("sinks", [0, 4])
def test_every_chunk_is_asked_for_once(template, sinks):
    words, context = Words(template), list(range(23))
    passes = KVzip(words, chunk=8, sinks=sinks).repeats(context)
    spans = [(p.start, p.stop) for p in passes]
    assert spans == ([(4, 12), (12, 20), (20, 23)] if sinks else [(0, 8), (8, 16), (16, 23)])
    end = words.ids("</user><answer>") if template else []
    for number, one in enumerate(passes):
        request = "Repeat the previous context exactly."
        cue = context[one.start - 8 : one.start] if number else []
        if number:
            request = "Repeat the part of the previous context exactly, starting with "
        expected = [*words.ids("\n\n" + request), *cue, *end, *context[one.start : one.stop]]
        assert list(one.ids) == expected


def test_a_prompt_is_kept_whole():
    assert KVzip().plan(shape(3), 100, 10) == (LayerPlan(None),) * 3


def test_the_worked_example_keeps_the_three_best():
    """Rows 6 and 7 stand in for the pass; 2 and 5 are equal, and both stay."""
    best = golden_prefill()[:, 6:, :6].amax((0, 1)).float()
    expected = torch.tensor([0.1117, 0.1364, 0.4101, 0.5005, 0.2248, 0.4101])
    torch.testing.assert_close(best, expected, atol=5e-5, rtol=0)
    for uniform in (False, True):
        keep = keep_best(best.view(1, 1, 6), 3, 0, uniform)
        assert keep.flatten().nonzero().flatten().tolist() == [2, 3, 5]


def sorted_best(scores, budget, sinks, uniform):
    """`keep_best` by sorting tuples."""
    layers, heads, tokens = scores.shape
    keys = [
        (t < min(sinks, budget), float(scores[l, h, t]), t, -l, -h)
        for l in range(layers)
        for h in range(heads)
        for t in range(tokens)
    ]
    keep = torch.zeros_like(scores, dtype=torch.bool)
    if not uniform:
        chosen = sorted(keys, reverse=True)[: layers * heads * budget]
    else:
        each = [[k for k in keys if k[3:] == (-l, -h)] for l in range(layers) for h in range(heads)]
        chosen = [k for one in each for k in sorted(one, reverse=True)[:budget]]
    for *_, t, l, h in chosen:
        keep[-l, -h, t] = True
    return keep


@given(data=st.data())
def test_the_best_of_all_layers_and_heads(data):
    layers, heads, tokens = (data.draw(st.integers(1, top)) for top in (3, 3, 12))
    budget, sinks = data.draw(st.integers(1, tokens)), data.draw(st.integers(0, 4))
    uniform, seed = data.draw(st.booleans()), data.draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 4, (layers, heads, tokens), generator=generator) / 4  # many ties
    keep = keep_best(scores, budget, sinks, uniform)
    assert torch.equal(keep, sorted_best(scores, budget, sinks, uniform))
    assert keep.sum() == layers * heads * budget
    assert keep[..., : min(sinks, budget)].all()
