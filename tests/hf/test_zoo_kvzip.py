"""KVzip against its reference: the passes that `generate` runs, and what they leave.

Which words ask for the repetition is the library's business: the passes are taken from the calls
of the model, and the part that each one repeats is the end of it that stands in the context.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from reference.kvzip import KVzipReference
from rig import greedy, kept, prompt, tiny_llama
from zoo import example

import sparsekv
from sparsekv.hf.compat import cache_key


def recorded(model, calls):
    """Let `calls` collect the input ids of every forward of the model."""

    def note(module, args, kwargs):
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None:
            calls.append(ids.clone())

    return model.model.register_forward_pre_hook(note, with_kwargs=True)


def repeated_part(ids, context):
    """(first, last) of the longest end of `ids` that stands in the context, both [1, .]."""
    text, whole = ids[0].tolist(), context[0].tolist()
    for length in range(min(len(text), len(whole)), 0, -1):
        for first in range(len(whole) - length + 1):
            if text[-length:] == whole[first : first + length]:
                return first, first + length
    raise AssertionError("a pass repeats nothing of the context")


def compressed(policy, budget, length, new, seed=0):
    """A generation under the policy, and a reference that has run the same passes."""
    calls, model = [], tiny_llama(seed)
    sparsekv.patch(model, policy, budget)
    hook = recorded(model, calls)
    run = greedy(model, prompt(length, seed), new)
    hook.remove()
    passes = [ids for ids in calls[1:] if ids.shape[1] > 1]
    assert passes, "no pass was run"
    reference = KVzipReference(tiny_llama(seed), policy, budget)
    first = reference.feed(prompt(length, seed))[-1]
    reference.compress([(ids, *repeated_part(ids, prompt(length, seed))) for ids in passes])
    return run, reference, first


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize(("budget", "length"), [(12, 50), (0.4, 61)])
def test_passes_decide(budget, length, uniform):
    policy = replace(example("kvzip"), uniform=uniform)
    run, reference, logits = compressed(policy, budget, length, 8)
    for step, token in enumerate(run.tokens[0].tolist()):
        torch.testing.assert_close(run.logits[step, 0], logits, atol=1e-4, rtol=0)
        if step < 7:
            logits = reference.feed(torch.tensor([[token]]))[-1]
    assert kept(run.cache) == reference.kept()


def test_passes_cover_the_context_once():
    calls, model = [], tiny_llama()
    sparsekv.patch(model, example("kvzip"), 12)
    hook = recorded(model, calls)
    greedy(model, prompt(50), 1)
    hook.remove()
    parts = sorted(repeated_part(ids, prompt(50)) for ids in calls[1:])
    assert parts[-1][1] == 50 and parts[0][0] <= 4  # sinks need no score
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    assert all(last - first <= 16 for first, last in parts)


def test_questions_stay_whole():
    """Later turns are kept, and the context is compressed once."""
    policy = example("kvzip")
    run, _, _ = compressed(policy, 12, 50, 4)
    before = kept(run.cache)
    assert sum(len(head) for layer in before for head in layer) == (12 + 3) * 6
    model = tiny_llama()
    sparsekv.patch(model, policy, 12)
    text = torch.cat([run.sequences, prompt(9, 1)], 1)
    second = greedy(model, text, 4, **{cache_key(model): run.cache})
    after = [[[*head, *range(53, 66)] for head in layer] for layer in before]
    assert kept(second.cache) == after


def test_a_tokenizer_is_asked_for():
    policy = replace(example("kvzip"), tokenizer=None)
    with pytest.raises(ValueError, match="tokenizer"):
        sparsekv.patch(tiny_llama(), policy, 12)


def test_gates_are_asked_for():
    policy = replace(example("duo"), gates=None)
    with pytest.raises(ValueError, match="gates"):
        sparsekv.patch(tiny_llama(), policy, 12)
    for shape in ((2, 2), (3, 4)):
        with pytest.raises(ValueError, match=r"expected .*gates.*, got "):
            sparsekv.patch(tiny_llama(), example("duo", *shape), 12)
