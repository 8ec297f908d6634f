"""Every policy under every feature: equal to the reference (or to itself), or refused.

What is expected of whom stands in `zoo.SUPPORT`; a policy is met here by its name alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rig import Loop, greedy, kept, left_padded, prompt, tiny_llama
from zoo import (
    EXAMPLES,
    FEATURES,
    GROUPS,
    NAMES,
    SUPPORT,
    check,
    example,
    held_to,
    support_page,
    truth,
)

import sparsekv
from sparsekv.hf.compat import cache_key
from sparsekv.policies import POLICIES

every_policy = pytest.mark.parametrize("name", [*NAMES, *(set(POLICIES) - set(NAMES))])
quiet = pytest.mark.filterwarnings("ignore:pyramid gives all")
pytestmark = quiet

# What keeps everything when the budget alone does not: a static window, a fixed decay.
ROOMY = {"duo": {"recent": 200}, "pyramidinfer": {"decay": None}}


def sizes(name):
    """(prompt length, budget): quest's unit is a page of 16."""
    return (90, 48) if name == "quest" else (37, 12)


def under(name, model, budget=None, **kwargs):
    """The model, patched with the example of `name`."""
    config = model.config
    policy = example(name, config.num_hidden_layers, config.num_key_value_heads)
    return sparsekv.patch(model, policy, budget or sizes(name)[1], **kwargs)


def pair(name, seed=0, **config):
    """The reference and a manual loop over the same weights."""
    model = tiny_llama(seed, **config)
    policy = example(name, model.config.num_hidden_layers, model.config.num_key_value_heads)
    budget = sizes(name)[1]
    return truth(model, policy, budget), Loop(sparsekv.patch(model, policy, budget))


def test_the_tables_know_every_policy():
    """A new policy needs an example and a row here, and is then tested by all that follows."""
    assert set(POLICIES) <= set(EXAMPLES) and set(POLICIES) <= set(SUPPORT)
    for row in SUPPORT.values():
        assert set(row) == set(FEATURES) and set(row.values()) <= {"right", "refused"}
    page = Path(__file__).resolve().parents[2] / "docs" / "support.md"
    assert page.read_text() == support_page(), (
        "PYTHONPATH=tests python tests/zoo.py > docs/support.md"
    )


# ------------------------------------------------------------------ against the reference


@every_policy
@pytest.mark.parametrize("seed", [0, 1])
def test_prompt_and_24_steps(name, seed):
    with held_to(SUPPORT[name]["loop"]):
        reference, loop = pair(name, seed)
        token = check(reference, loop, prompt(sizes(name)[0], seed), name == "pyramidinfer")
        for _ in range(24):
            token = check(reference, loop, token)


@every_policy
@pytest.mark.parametrize("heads", GROUPS)
def test_groups_of_heads(name, heads):
    """1, 3, 4 and 8 queries a KV head, and one KV head for all."""
    with held_to(SUPPORT[name]["loop"]):
        reference, loop = pair(name, 2, num_hidden_layers=2, **GROUPS[heads])
        token = check(reference, loop, prompt(sizes(name)[0], 2), name == "pyramidinfer")
        for _ in range(8):
            token = check(reference, loop, token)


@every_policy
def test_grows_into_its_budget(name):
    """A prompt below the budget; decoding fills it and goes on."""
    with held_to("right" if name == "kvzip" else SUPPORT[name]["loop"]):  # it needs no passes
        reference, loop = pair(name, 4)
        token = check(reference, loop, prompt(5, 4), name == "pyramidinfer")
        for _ in range(30):
            token = check(reference, loop, token)


@every_policy
def test_prompt_in_chunks(name):
    """Chunks shorter and longer than windows, and what is decoded after them."""
    length, budget = sizes(name)
    with held_to(SUPPORT[name]["chunked"]):
        model = under(name, tiny_llama(6))
        run = greedy(model, prompt(length + 7, 6), 8, prefill_chunk_size=10)
        if name == "kvzip":  # see test_zoo_kvzip.py
            return
        reference = truth(tiny_llama(6), example(name), budget)
        whole, rest = prompt(length + 7, 6).split([(length + 7) // 10 * 10, (length + 7) % 10], 1)
        for chunk in whole.split(10, dim=1):
            reference.feed(chunk)
        tokens, logits = reference.generate(rest, 8)
        assert run.tokens[0].tolist() == tokens
        torch.testing.assert_close(run.logits[:, 0], logits, atol=1e-4, rtol=0)
        assert kept(run.cache) == reference.kept()


@every_policy
def test_a_quantised_cache(name):
    """Both sides round the same numbers: prompt, steps, a second turn, steps."""
    with held_to(SUPPORT[name]["quantised"]):
        model, budget = tiny_llama(5).double(), sizes(name)[1]
        policy = example(name)
        sparsekv.patch(model, policy, budget, kv_dtype="int8")
        if name in ("kvzip", "pyramidinfer"):  # their references know no rounding
            greedy(model, prompt(40, 5), 8)
            return
        reference, loop = truth(model, policy, budget, kv_dtype="int8"), Loop(model)
        # No token twice: the same token has keys of the same norm, and knorm would rank the noise.
        ids = torch.randperm(126, generator=torch.Generator().manual_seed(12))[None] + 2
        for start, length, steps in ((0, sizes(name)[0], 12), (100, 9, 4)):
            token = check(reference, loop, ids[:, start : start + length])
            for _ in range(steps):
                token = check(reference, loop, token)


@every_policy
def test_turns(name):
    """The second turn feeds the last token of the first together with the question."""
    length, budget = sizes(name)
    model = under(name, tiny_llama(7))
    first = greedy(model, prompt(length, 7), 10)
    text = torch.cat([first.sequences, prompt(9, 8)], 1)
    with held_to(SUPPORT[name]["turns"]):
        second = greedy(model, text, 10, **{cache_key(model): first.cache})
        if name == "kvzip":
            return
        reference = truth(tiny_llama(7), example(name), budget, remember=False)
        assert reference.generate(prompt(length, 7), 10)[0] == first.tokens[0].tolist()
        tokens, logits = reference.generate(text[:, length + 9 :], 10)
        assert second.tokens[0].tolist() == tokens
        torch.testing.assert_close(second.logits[:, 0], logits, atol=1e-4, rtol=0)
        assert kept(second.cache) == reference.kept()


# ------------------------------------------------------------------ against itself


@every_policy
def test_deferred_chunks_are_one_forward(name):
    length, _ = sizes(name)
    with held_to(SUPPORT[name]["deferred"]):
        once = greedy(under(name, tiny_llama()), prompt(length), 8)
        model = under(name, tiny_llama(), defer_eviction=True)
        chunked = greedy(model, prompt(length), 8, prefill_chunk_size=10)
        assert chunked.tokens.tolist() == once.tokens.tolist()
        torch.testing.assert_close(chunked.logits, once.logits, atol=1e-4, rtol=0)
        assert kept(chunked.cache) == kept(once.cache)


@every_policy
@pytest.mark.parametrize("budget", [48, 1000])
def test_a_budget_that_holds_everything_is_dense(name, budget):
    """Bit for bit what the full policy gives, for the prompt and for the steps within it."""
    policy = replace(example(name), **ROOMY.get(name, {}))
    full = greedy(sparsekv.patch(tiny_llama(), "full", 1), prompt(40), 8)
    run = greedy(sparsekv.patch(tiny_llama(), policy, budget), prompt(40), 8)
    assert torch.equal(run.logits[0], full.logits[0])
    torch.testing.assert_close(run.logits, full.logits, atol=1e-5, rtol=0)
    assert kept(run.cache) == [[list(range(47))] * 2] * 3


@every_policy
def test_a_padded_batch_is_each_row_alone(name):
    length, _ = sizes(name)
    rows = [prompt(length), prompt(length - 15, 1)]
    with held_to(SUPPORT[name]["padding"]):
        model = under(name, tiny_llama())
        batch = left_padded(*rows)
        run = greedy(model, batch["input_ids"], 12, attention_mask=batch["attention_mask"])
        for i, ids in enumerate(rows):
            alone, pad = greedy(model, ids, 12), length - ids.shape[1]
            assert run.tokens[i].tolist() == alone.tokens[0].tolist()
            torch.testing.assert_close(run.logits[:, i], alone.logits[:, 0], atol=1e-4, rtol=0)
            shifted = [[[j + pad for j in head] for head in layer] for layer in kept(alone.cache)]
            assert kept(run.cache, i) == shifted


@every_policy
def test_equal_rows_of_a_batch_are_each_row_alone(name):
    """B04, and no padding in the way."""
    length, _ = sizes(name)
    rows = [prompt(length), prompt(length, 1)]
    model = under(name, tiny_llama())
    run = greedy(model, torch.cat(rows), 8)
    for i, ids in enumerate(rows):
        alone = greedy(model, ids, 8)
        torch.testing.assert_close(run.logits[:, i], alone.logits[:, 0], atol=1e-4, rtol=0)
        assert kept(run.cache, i) == kept(alone.cache)


def rescore(model, ids, tokens):
    """Log-probability of `tokens` after `ids` under the model's policy."""

    def forced(row, text):
        return [tokens[text.shape[-1] - ids.shape[1]]]

    run = greedy(model, ids, len(tokens), prefix_allowed_tokens_fn=forced)
    rows = run.logits[:, 0].log_softmax(-1)
    return float(rows[torch.arange(len(tokens)), tokens].sum())


@every_policy
def test_beam_scores_are_those_of_the_text(name):
    """B48: slots, scores and queries follow the beams."""
    length, _ = sizes(name)
    rows = [prompt(length), prompt(length - 9, 1)]
    with held_to(SUPPORT[name]["beams"]):
        model = under(name, tiny_llama())
        output = model.generate(
            **left_padded(*rows), max_new_tokens=8, num_beams=3, num_return_sequences=2,
            do_sample=False, length_penalty=0.0, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        for i, tokens in enumerate(output.sequences[:, length:].tolist()):
            expected = rescore(model, rows[i // 2], tokens)
            assert float(output.sequences_scores[i]) == pytest.approx(expected, abs=1e-3)


@every_policy
def test_drafts_change_nothing(name):
    """B50: what prompt lookup gives is the greedy text, and the cache is as without."""
    length, _ = sizes(name)
    ids = prompt(length)
    ids = torch.cat([ids, ids[:, 5:17]], 1)
    with held_to(SUPPORT[name]["drafts"]):
        model = under(name, tiny_llama())
        plain = greedy(model, ids, 16)
        drafted = greedy(model, ids, 16, prompt_lookup_num_tokens=4)
        assert drafted.tokens.tolist() == plain.tokens.tolist()
        assert kept(drafted.cache) == kept(plain.cache)


@every_policy
def test_rows_change_places(name):
    """Everything that a row has follows it when the cache is reordered and repeated."""
    length, _ = sizes(name)
    rows, steps = [prompt(length), prompt(length, 1)], torch.cat([prompt(9, 2), prompt(9, 3)])
    with held_to(SUPPORT[name]["swaps"]):
        model = under(name, tiny_llama())
        loop = Loop(model)
        loop.feed(torch.cat(rows))
        for ids in steps[:, :3].split(1, dim=1):
            loop.feed(ids)
        loop.cache.reorder_cache(torch.tensor([1, 0]))
        for ids in steps.flip(0)[:, 3:6].split(1, dim=1):
            loop.feed(ids)
        loop.cache.batch_repeat_interleave(2)
        for ids in steps.flip(0)[:, 6:].repeat_interleave(2, 0).split(1, dim=1):
            logits = loop.feed(ids)
        for row in range(4):
            alone = Loop(model)
            alone.feed(rows[1 - row // 2])
            for ids in steps[1 - row // 2][None].split(1, dim=1):
                expected = alone.feed(ids)
            torch.testing.assert_close(logits[row], expected[0], atol=1e-4, rtol=0)
            assert loop.kept(row) == alone.kept()


@every_policy
def test_prompts_do_not_leak_into_each_other(name):
    """B56: A, then B, is B in a fresh process."""
    length, _ = sizes(name)
    model = under(name, tiny_llama())
    fresh = greedy(under(name, tiny_llama()), prompt(length - 4, 1), 16)
    greedy(model, prompt(length + 13), 16)
    later = greedy(model, prompt(length - 4, 1), 16)
    assert torch.equal(later.logits, fresh.logits)
    assert kept(later.cache) == kept(fresh.cache)


@every_policy
def test_a_run_repeats(name):
    """Nothing depends on the state of a random generator."""
    length, _ = sizes(name)
    model = under(name, tiny_llama())
    torch.manual_seed(1)
    once = greedy(model, prompt(length), 8)
    torch.manual_seed(2)
    again = greedy(model, prompt(length), 8)
    assert torch.equal(once.logits, again.logits)
    assert kept(once.cache) == kept(again.cache)


def shuffle_slots(cache, seed):
    """Move what every head holds to other slots of it; heads with one set keep one order."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(len(cache.layers)):
        store, local = cache.state.store(layer)
        pool, orders = store.pool, {}
        fields = [pool.k_pages, pool.v_pages, pool.positions, pool.scores]
        for row, head in torch.cartesian_prod(*map(torch.arange, store.lens.shape[1:])).tolist():
            slots = torch.arange(int(store.lens[local, row, head]))
            pages = store.block_table[local, row, head, slots // pool.page_size].long()
            at = slots % pool.page_size
            held = tuple(pool.positions[pages, at].tolist())
            if (row, held) not in orders:
                orders[row, held] = torch.randperm(len(held), generator=generator)
            moved = orders[row, held]
            for field in fields:
                field[pages, at] = field[pages[moved], at[moved]]


@every_policy
def test_slots_have_no_order(name):
    """Attention, scores and evictions follow the keys wherever they lie."""
    if name == "quest":
        pytest.skip("quest attends whole pages: which keys share one is part of the method")
    length, _ = sizes(name)
    with held_to(SUPPORT[name]["loop"]):
        model = under(name, tiny_llama())
        plain, shuffled = Loop(model), Loop(model)
        token = plain.feed(prompt(length))[:, -1:].argmax(-1)
        shuffled.feed(prompt(length))
        for step in range(16):
            shuffle_slots(shuffled.cache, step)
            expected, got = plain.feed(token), shuffled.feed(token)
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
            assert shuffled.kept() == plain.kept()
            token = expected.argmax(-1)


@every_policy
def test_what_is_held_is_what_is_planned(name):
    """B25, B29: the budget holds after the prompt and after every step, in pages that exist."""
    if name in ("full", "quest", "kvzip", "pyramidinfer"):
        pytest.skip("keeps everything, or not per layer")
    length, budget = sizes(name)
    model = under(name, tiny_llama())
    reference = truth(tiny_llama(), example(name), budget)
    loop = Loop(model)
    ids = prompt(length)
    for _ in range(20):
        loop.feed(ids)
        reference.feed(ids)
        counts = [[len(head) for head in layer] for layer in loop.kept()]
        assert counts == [[len(head) for head in layer] for layer in reference.kept()]
        pages = sum(-(-n // 16) for layer in counts for n in layer)
        room = name in ("scissorhands", "keydiff", "rkv")  # grow up to a limit, 2 pages here
        assert pages <= loop.cache.report().pages_used <= (12 if room else pages)
        ids = prompt(1, int(ids[0, -1]))
