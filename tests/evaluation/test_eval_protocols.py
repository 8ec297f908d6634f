"""Both protocols, question by question, against loops that anybody would write.

One row, one cache and one question at a time; no recording, no batch, no padding.
"""

from __future__ import annotations

import pytest
import torch
from eval_rig import made_up
from zoo import NAMES, example

import sparsekv
from sparsekv.evaluation.records import PROTOCOLS
from sparsekv.evaluation.runner import evaluate
from sparsekv.hf.compat import cache_key
from sparsekv.policies import POLICIES, Streaming

AWARE, AGNOSTIC = PROTOCOLS
BUDGET = 12
STEPPED = ("quest", "pyramidinfer")


def feed(model, cache, ids, chunk=False):
    """Logits [T, V] of more tokens; chunk: one token is no decode step."""
    if chunk:
        cache.state.chunked_until = 1 << 30
    with torch.no_grad():
        return model(
            input_ids=torch.tensor([ids]), use_cache=True, **{cache_key(model): cache}
        ).logits[0]


def judged(logits, answer):
    """(summed NLL, right tokens) of an answer whose logits end in the last row."""
    rows = logits[-len(answer) :].double()
    target = torch.tensor(answer)
    nll = -rows.log_softmax(-1)[torch.arange(len(answer)), target].sum()
    return float(nll), int((rows.argmax(-1) == target).sum())


def compressed(model, ids):
    cache = sparsekv.new_cache(model)
    feed(model, cache, ids)
    if cache.state.policy.extra_passes:
        sparsekv.compress(model, cache, torch.tensor([ids]))
    return cache


def by_hand(model, context, question, answer, protocol, stepped):
    """(summed NLL, right tokens, kept)."""
    prompt = question.prompt
    aware = protocol == AWARE
    cache = compressed(model, context + prompt[:-1] if aware else context)
    kept = cache.report().kept.mean
    rest = (*prompt[-1:], *answer[:-1]) if aware else (*prompt, *answer[:-1])
    if not stepped:
        return *judged(feed(model, cache, rest, chunk=True), answer), kept
    if cache.state.policy.selects_pages and not aware:
        feed(model, cache, prompt[:-1], chunk=True)
        cache.state.chunked_until = 0
        rest = (*prompt[-1:], *answer[:-1])
    rows = [feed(model, cache, [token]) for token in rest]
    return *judged(torch.cat(rows), answer), kept


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", NAMES)
def test_forced_answers(subject, name, protocol):
    model, tokenizer = subject
    task, policy = made_up(), example(name, layers=2)
    if name == "pyramidinfer":  # with a decay of its own no budget is too small
        assert policy.decay is not None
    found = evaluate(model, tokenizer, task, policy, BUDGET, protocol)
    assert len(found) == 9 and all(record.refused is None for record in found)
    sparsekv.patch(model, policy, BUDGET)
    asked = {(e.id, q.id): (e, q) for e in task.examples for q in e.questions}
    for record in found:
        e, q = asked[record.example, record.question]
        answer = q.answers[0]
        nll, right, kept = by_hand(model, e.context, q, answer, protocol, name in STEPPED)
        assert record.nll * len(answer) == pytest.approx(nll, abs=2e-4)
        assert record.right_tokens == right and record.answer_tokens == len(answer)
        assert record.em == (right == len(answer)) and record.acc == right / len(answer)
        if name != "full" or protocol == AGNOSTIC:  # of a dense cache one protocol is run
            assert record.kept == pytest.approx(kept)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("name", "common"), [
    ("full", 0), ("snapkv", 0), ("adakv", 20), ("h2o", 20), ("keydiff", 20), ("quest", 0),
])  # fmt: skip
def test_choices(subject, name, common, protocol):
    """common: what all questions begin with is long enough to be fed once."""
    model, tokenizer = subject
    task, policy = made_up("choice", shortest=3, common=common), example(name, layers=2)
    found = evaluate(model, tokenizer, task, policy, BUDGET, protocol)
    sparsekv.patch(model, policy, BUDGET)
    asked = {(e.id, q.id): (e, q) for e in task.examples for q in e.questions}
    for record in found:
        e, q = asked[record.example, record.question]
        each = [
            by_hand(model, e.context, q, answer, protocol, name in STEPPED)[0]
            for answer in q.answers
        ]
        assert record.mc == float(min(range(4), key=each.__getitem__) == q.right)
        assert record.nll * len(q.answers[q.right]) == pytest.approx(each[q.right], abs=2e-4)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", ["full", "streaming", "h2o", "layersplit", "rkv", "pyramidinfer"])
def test_generated_texts(subject, name, protocol):
    """A decode step a token; what follows an end of text is not part of it."""
    model, tokenizer = subject
    task, policy = made_up("generated", shortest=3), example(name, layers=2)
    found = evaluate(model, tokenizer, task, policy, BUDGET, protocol)
    sparsekv.patch(model, policy, BUDGET)
    asked = {(e.id, q.id): (e, q) for e in task.examples for q in e.questions}
    ends = {tokenizer.eos_token_id}
    for record in found:
        e, q = asked[record.example, record.question]
        # A dense cache is asked in one way under both.
        aware = protocol == AWARE and name != "full"
        cache = compressed(model, e.context + q.prompt[:-1] if aware else e.context)
        if aware or name == "pyramidinfer":
            for token in q.prompt[-1:] if aware else q.prompt:
                logits = feed(model, cache, [token])
        else:
            logits = feed(model, cache, q.prompt, chunk=True)
            cache.state.chunked_until = 0
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < task.max_new_tokens and tokens[-1] not in ends:
            tokens.append(int(feed(model, cache, tokens[-1:])[-1].argmax()))
        expected = tokenizer.decode(tokens, skip_special_tokens=True)
        assert record.text == expected and record.score == len(expected)


def test_dense_is_the_unpatched_model(subject):
    """Within its budget a policy is dense, too; so nothing of ours is left in the numbers."""
    model, tokenizer = subject
    task = made_up()
    for policy, budget in (("full", 1), ("snapkv", 512)):
        for protocol in PROTOCOLS:
            found = evaluate(model, tokenizer, task, policy, budget, protocol)
            sparsekv.unpatch(model)
            for record in found:
                e = next(e for e in task.examples if e.id == record.example)
                q = next(q for q in e.questions if q.id == record.question)
                ids = torch.tensor([e.context + q.prompt + q.answers[0][:-1]])
                with torch.no_grad():
                    nll, right = judged(model(ids).logits[0], q.answers[0])
                assert record.nll * len(q.answers[0]) == pytest.approx(nll, abs=2e-4)
                assert record.right_tokens == right


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_streaming_is_a_mask(subject, protocol):
    """What is evicted is invisible to everything behind the compressed prompt, and only to it."""
    model, tokenizer = subject
    task, sinks = made_up(), Streaming().sinks
    found = evaluate(model, tokenizer, task, Streaming(), BUDGET, protocol)
    sparsekv.unpatch(model)
    for record in found:
        e = next(e for e in task.examples if e.id == record.example)
        q = next(q for q in e.questions if q.id == record.question)
        ids = e.context + q.prompt + q.answers[0][:-1]
        cut = len(e.context) + (len(q.prompt) - 1 if protocol == AWARE else 0)
        seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        seen[cut:, sinks : cut - (BUDGET - sinks)] = False
        with torch.no_grad():
            logits = model(torch.tensor([ids]), attention_mask=seen[None, None]).logits[0]
        nll, right = judged(logits, q.answers[0])
        assert record.nll * len(q.answers[0]) == pytest.approx(nll, abs=2e-4)
        assert record.right_tokens == right and record.kept == BUDGET


@pytest.mark.parametrize("name", ["streaming", "h2o", "tova", "layersplit"])
def test_steps_are_decode_steps(subject, name):
    """With feed="steps" policies that drop at every step do; a chunk would not let them."""
    model, tokenizer = subject
    task, policy = made_up(shortest=4), example(name, layers=2)
    for protocol in PROTOCOLS:
        found = evaluate(model, tokenizer, task, policy, BUDGET, protocol, feed="steps")
        sparsekv.patch(model, policy, BUDGET)
        for record in found:
            e = next(e for e in task.examples if e.id == record.example)
            q = next(q for q in e.questions if q.id == record.question)
            aware = protocol == AWARE
            cache = compressed(model, e.context + q.prompt[:-1] if aware else e.context)
            if not aware:
                feed(model, cache, q.prompt[:-1], chunk=True)
                cache.state.chunked_until = 0
            fed = (*q.prompt[-1:], *q.answers[0][:-1])
            rows = torch.cat([feed(model, cache, [token]) for token in fed])
            nll, right = judged(rows, q.answers[0])
            assert record.nll * len(q.answers[0]) == pytest.approx(nll, abs=2e-4)
            assert (record.right_tokens, record.feed) == (right, "steps")


def test_every_policy_is_in_the_table_of_examples():
    assert set(POLICIES) <= set(NAMES)


@pytest.mark.parametrize("kind", ["forced", "choice", "generated"])
@pytest.mark.parametrize("feed", ["chunk", "steps"])
@torch.no_grad()
def test_a_model_that_overflows_has_no_score(subject, kind, feed):
    """The argmax of NaN is some token: it would count as a wrong answer, or as the first choice."""
    model, tokenizer = subject
    model.lm_head.weight[5] = float("nan")
    for protocol in PROTOCOLS:
        (record,) = evaluate(model, tokenizer, made_up(kind), "snapkv", 16, protocol, feed=feed)
        assert (
            record.refused is not None and "expected numbers as logits, got NaN" in record.refused
        )
