"""Quest through a model: against pages chosen explicitly from dense keys."""

from __future__ import annotations

import copy

import pytest
import torch
from rig import Loop, greedy, left_padded, prompt, tiny_llama
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import sparsekv
from sparsekv.policies import Quest
from sparsekv.steady import hold

SIZE = 16


def chosen_pages(q, k, budget):
    """bool [HK, S]: tokens that a query [HQ, D] attends among keys [HK, S, D], by the paper."""
    heads, slots, _ = k.shape
    attended = torch.zeros(heads, slots, dtype=torch.bool)
    pages = -(-slots // SIZE)
    for h in range(heads):
        bound = {}
        for page in range(pages):
            keys = k[h, page * SIZE : (page + 1) * SIZE]
            low, high = keys.amin(0), keys.amax(0)
            group = q.unflatten(0, (heads, -1))[h]
            bound[page] = max(float(torch.maximum(x * low, x * high).sum()) for x in group)
        others = sorted(range(1, pages - 1), key=lambda page: (-bound[page], -page))
        room = max(2, budget // SIZE) - 2
        best = range(pages) if slots <= budget else {0, pages - 1, *others[:room]}
        for page in best:
            attended[h, page * SIZE : (page + 1) * SIZE] = True
    return attended


def reference(budget, dense_layers):
    """An attention function on dense caches of one row that reads chosen pages in decode steps."""

    def attention(module, query, key, value, attention_mask, scaling, **kwargs):
        group = query.shape[1] // key.shape[1]
        tokens, slots = query.shape[2], key.shape[2]
        seen = torch.ones(tokens, slots, dtype=torch.bool).tril(slots - tokens)
        seen = seen.expand(query.shape[1], -1, -1)
        if tokens == 1 and module.layer_idx >= dense_layers:
            pages = chosen_pages(query[0, :, 0], key[0], budget)
            seen = pages.repeat_interleave(group, 0)[:, None]
        logits = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * scaling
        probs = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        return (probs @ value.repeat_interleave(group, 1)).transpose(1, 2), None

    return attention


@pytest.mark.parametrize("budget", [8, 32, 48, 70, 0.5])
@pytest.mark.parametrize("dense_layers", [0, 2])
def test_steps_read_the_pages_that_the_paper_chooses(budget, dense_layers):
    ids = prompt(75)
    sparse = Loop(sparsekv.patch(tiny_llama(), Quest(dense_layers), budget))
    tokens, logits = sparse.generate(ids, 20)
    model = tiny_llama()
    resolved = budget if isinstance(budget, int) else 38  # half of 75, rounded up
    AttentionInterface.register("quest_reference", reference(resolved, dense_layers))
    AttentionMaskInterface.register("quest_reference", eager_mask)
    model.set_attn_implementation("quest_reference")
    expected, reference_logits = Loop.dense(model).generate(ids, 20)
    assert tokens == expected
    torch.testing.assert_close(logits, reference_logits, atol=2e-4, rtol=2e-4)
    dense, _ = Loop.dense(tiny_llama()).generate(ids, 20)
    assert tokens != dense or budget == 70  # the pages that were left out matter


@pytest.mark.parametrize("budget", [60, 1.0, 500])
def test_within_the_budget_it_is_dense(budget, model):
    ids = prompt(40)
    dense = greedy(model, ids, 20 if budget != 1.0 else 1)
    sparsekv.patch(model, Quest(0), budget)
    sparse = greedy(model, ids, dense.tokens.shape[1])
    assert torch.equal(sparse.tokens, dense.tokens)
    torch.testing.assert_close(sparse.logits, dense.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("budget", [32, 0.4])
def test_rows_of_a_batch_are_those_of_single_prompts(budget, model):
    sparsekv.patch(model, Quest(1), budget)
    rows = [prompt(90, 1), prompt(40, 2), prompt(64, 3)]
    batch = left_padded(*rows)
    together = greedy(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    for i, row in enumerate(rows):
        alone = greedy(model, row)
        assert torch.equal(together.tokens[i], alone.tokens[0])
        torch.testing.assert_close(together.logits[:, i], alone.logits[:, 0], atol=1e-4, rtol=1e-4)


def test_chunks_turns_and_one_forward_leave_the_same_pages(model):
    """The bounds of a page are those of its keys, however these came."""
    sparsekv.patch(model, Quest(0), 48)
    ids = prompt(101)
    whole, parts, steps = (Loop(model) for _ in range(3))
    whole.feed(ids)
    for part in ids.split([30, 17, 1, 33, 20], dim=1):
        parts.feed(part)
    steps.feed(ids[:, :100])
    steps.feed(ids[:, 100:])
    for a, b in ((whole, parts), (whole, steps)):
        for layer in range(1):  # deeper keys differ by what steps have attended
            assert a.cache.kept_positions(layer) == b.cache.kept_positions(layer)
            for name in ("page_min", "page_max"):
                x, y = (bounds(loop.cache, layer, name) for loop in (a, b))
                torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


def bounds(cache, layer, name):
    store, local = cache.state.store(layer)
    table = store.block_table[local, :, :, : store.width(local)].long()
    return getattr(store.pool, name)[table]


def test_drafts_that_are_taken_back_leave_no_trace(model):
    """Assisted decoding: rejected drafts do not widen the bounds of a page."""
    sparsekv.patch(model, Quest(0), 48)
    ids = prompt(70)
    plain, drafted = Loop(model), Loop(model)
    drafted.cache.activate_past_recording()
    plain.feed(ids)
    drafted.feed(ids)
    drafted.cache.crop(0)
    new = prompt(9, seed=4)
    for rejected in (2, 3):
        drafts = torch.cat([new[:, :1], 7 * torch.ones_like(new[:, :rejected])], 1)
        drafted.feed(drafts)
        drafted.cache.crop(-rejected)
        plain.feed(new[:, :1])
        new = new[:, 1:]
    for layer in range(3):
        for name in ("page_min", "page_max"):
            x, y = (bounds(loop.cache, layer, name) for loop in (plain, drafted))
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
    expected, found = plain.feed(new[:, :1]), drafted.feed(new[:, :1])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_beams_fork_their_bounds(model):
    """Beam search over a full budget equals dense beam search, and over a small one itself."""
    ids = prompt(70)
    dense = greedy_beams(copy.deepcopy(model), ids)
    sparsekv.patch(model, Quest(0), 500)
    assert torch.equal(greedy_beams(model, ids), dense)
    sparsekv.patch(model, Quest(0), 32)
    cache = sparsekv.new_cache(model)
    loop = Loop(model, cache)
    loop.feed(ids)
    cache.batch_repeat_interleave(2)
    for token in ([[5], [6]], [[7], [8]], [[9], [9]]):
        loop.feed(torch.tensor(token))
    cache.reorder_cache(torch.tensor([1, 1]))
    forked = loop.feed(torch.tensor([[3], [3]]))
    alone = Loop(model)
    alone.feed(ids)
    for token in (6, 8, 9):
        alone.feed(torch.tensor([[token]]))
    expected = alone.feed(torch.tensor([[3]]))
    torch.testing.assert_close(forked, expected.expand_as(forked), atol=1e-4, rtol=1e-4)


def greedy_beams(model, ids):
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, num_beams=3, do_sample=False
    )


@pytest.mark.parametrize("budget", [32, 100])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_steady_steps_equal_ordinary_steps(budget, kv_dtype):
    ordinary, steady = (
        Loop(sparsekv.patch(tiny_llama(), Quest(1), budget, kv_dtype=kv_dtype)) for _ in range(2)
    )
    for loop in (ordinary, steady):
        loop.feed(prompt(60))
    ids = prompt(40, seed=9)
    for i in range(40):
        if i in (2, 22):
            hold(steady.cache.state, 20)
        expected = ordinary.feed(ids[:, i : i + 1])
        torch.testing.assert_close(steady.feed(ids[:, i : i + 1]), expected, atol=1e-5, rtol=1e-5)


def test_the_bounds_of_quantised_pages_are_those_of_the_true_keys():
    exact, quantised = (
        Loop(sparsekv.patch(tiny_llama(), Quest(0), 32, kv_dtype=form)) for form in (None, "int4")
    )
    for loop in (exact, quantised):
        loop.feed(prompt(60))
    for layer in range(3):
        for name in ("page_min", "page_max"):
            assert torch.equal(*(bounds(x.cache, layer, name) for x in (exact, quantised)))


def test_a_second_prompt_knows_nothing_of_the_first(model):
    sparsekv.patch(model, Quest(0), 32)
    fresh = greedy(model, prompt(60, 5))
    cache = sparsekv.new_cache(model)
    loop = Loop(model, cache)
    loop.feed(100 * torch.ones(1, 200, dtype=torch.long))
    loop.generate(prompt(20, 8), 5)
    cache.reset()
    assert loop.generate(prompt(60, 5), 12)[0] == fresh.tokens[0].tolist()


def test_the_report_says_that_nothing_is_freed(model):
    sparsekv.patch(model, Quest(0), 32)
    report = greedy(model, prompt(100)).cache.report()
    assert "quest frees no memory" in str(report) and "frees no memory" in report.to_dict()["note"]
    assert report.kept.min == report.kept.max == 111  # the last new token is not fed
    full = Loop(sparsekv.patch(tiny_llama(), "full"))
    full.feed(prompt(100))
    store = full.cache
    assert report.kv_bytes >= report.dense_bytes and store.report().note is None
    assert report.metadata_bytes > store.report().metadata_bytes
