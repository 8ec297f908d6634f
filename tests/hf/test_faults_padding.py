"""Faults of the field, section 1: padding and batches."""

from __future__ import annotations

import pytest
import torch
from families import build
from reference import Reference
from rig import (
    EVICTING,
    POLICIES,
    Loop,
    greedy,
    kept,
    left_padded,
    patched,
    prompt,
    slot_scores,
    tiny_llama,
)

import sparsekv
from sparsekv.hf.compat import cache_key


def padding(batch):
    return {"attention_mask": batch["attention_mask"]}


def assert_same_row(batch, single, row, pads):
    """Row `row` of a left-padded run equals the run of that row alone."""
    assert batch.tokens[row].tolist() == single.tokens[0].tolist()
    torch.testing.assert_close(batch.logits[:, row], single.logits[:, 0], atol=1e-4, rtol=0)
    shifted = [[[j + pads for j in head] for head in layer] for layer in kept(single.cache)]
    assert kept(batch.cache, row) == shifted


def test_b01_left_padding_positions(model):
    """A row behind 16 pads, nothing else evicted, is the dense run of the bare row."""
    row = prompt(24)
    dense = greedy(model, row)
    batch = left_padded(row, prompt(40, 1))
    run = greedy(patched(model, "full", 1), batch["input_ids"], **padding(batch))
    assert run.tokens[0].tolist() == dense.tokens[0].tolist()
    torch.testing.assert_close(run.logits[:, 0], dense.logits[:, 0], atol=1e-4, rtol=0)
    assert kept(run.cache)[0][0] == list(range(16, 51))


def test_b01_manual_loop_with_padding(model):
    """The same without generate(): a mask in the first forward, columns afterwards."""
    batch = left_padded(prompt(24), prompt(40, 1))
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    dense = greedy(model, prompt(24), 1).logits[0, 0]
    loop = Loop(patched(model, "full", 1))
    logits = loop.feed(
        batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=positions
    )
    torch.testing.assert_close(logits[0, -1], dense, atol=1e-4, rtol=0)


def test_b02_sinks_are_real_tokens(model):
    batch = left_padded(prompt(24), prompt(40, 1))
    run = greedy(patched(model, "streaming", 12), batch["input_ids"], 1, **padding(batch))
    for head in (head for layer in kept(run.cache) for head in layer):
        assert head == [16, 17, 18, 19, *range(32, 40)]


@pytest.mark.parametrize("policy", EVICTING)
def test_b03_budget_counts_real_tokens(policy, model):
    """Half of 40 and half of 24 real tokens, each row as if it were alone."""
    rows = [prompt(40), prompt(24, 1)]
    batch = left_padded(*rows)
    run = greedy(patched(model, policy, 0.5), batch["input_ids"], **padding(batch))
    for i, row in enumerate(rows):
        assert_same_row(run, greedy(model, row), i, 40 - row.shape[1])


def test_b03_counts_by_row(model):
    batch = left_padded(prompt(40), prompt(24, 1))
    run = greedy(patched(model, "snapkv", 0.5), batch["input_ids"], 1, **padding(batch))
    assert {len(head) for layer in kept(run.cache, 0) for head in layer} == {20}
    assert {len(head) for layer in kept(run.cache, 1) for head in layer} == {12}


@pytest.mark.parametrize("policy", POLICIES)
def test_b04_b05_batch_is_its_rows(policy, model):
    """Equal lengths: no score, chunk or index of row 0 reaches row 1."""
    rows = [prompt(36), prompt(36, 1)]
    patched(model, policy, 16)
    run = greedy(model, torch.cat(rows))
    for i, row in enumerate(rows):
        assert_same_row(run, greedy(model, row), i, 0)


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "layersplit"])
def test_b05_rows_on_both_sides_of_the_budget(policy, model):
    """One row is cut at once, one grows into the budget, one has a single token."""
    rows = [prompt(40), prompt(9, 1), prompt(1, 2)]
    batch = left_padded(*rows)
    patched(model, policy, 14)
    run = greedy(model, batch["input_ids"], 14, **padding(batch))
    for i, row in enumerate(rows):
        assert_same_row(run, greedy(model, row, 14), i, 40 - row.shape[1])


def test_b06_right_padding_is_refused(model):
    ids = torch.cat([prompt(20), torch.zeros(1, 4, dtype=torch.long)], 1)
    mask = (ids != 0).long()
    with pytest.raises(ValueError, match="left padding"):
        greedy(patched(model, "snapkv", 12), ids, attention_mask=mask)
    mask[0, 10] = 0  # a hole in the middle
    with pytest.raises(ValueError, match="left padding"):
        Loop(model).feed(ids, attention_mask=mask)


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "streaming"])
def test_b09_finished_rows_do_not_disturb_others(policy):
    model = patched(tiny_llama(), policy, 14)
    rows = [prompt(30), prompt(26, 1)]
    alone = [greedy(model, row) for row in rows]
    eos = int(alone[0].tokens[0, 3])
    assert eos not in alone[1].tokens[0]
    batch = left_padded(*rows)
    run = greedy(model, batch["input_ids"], eos_token_id=eos, **padding(batch))
    assert run.tokens[0, 4:].tolist() == [0] * 8  # row 0 is finished and fed pads
    assert run.tokens[1].tolist() == alone[1].tokens[0].tolist()
    assert kept(run.cache, 1) == [[[j + 4 for j in h] for h in l] for l in kept(alone[1].cache)]


@pytest.mark.parametrize("policy", POLICIES)
def test_b09_pads_between_turns(policy):
    """Turn 2 of a batch is left-padded too, so one row has pads in its middle.

    Neither sinks, recent windows nor budgets may count them: each row is as if it were alone.
    """
    model = patched(tiny_llama(), policy, 14)
    first = [prompt(20), prompt(3, 1)]
    second = [prompt(12, 2), prompt(5, 3)]
    alone = []
    for one, two in zip(first, second, strict=True):
        loop = Loop(model)
        loop.feed(one)
        alone.append((loop.generate(two, 16), loop))
    turns = [left_padded(*first), left_padded(*second)]
    loop = Loop(model)
    mask = turns[0]["attention_mask"]
    positions = mask.cumsum(-1) - 1
    loop.feed(turns[0]["input_ids"], attention_mask=mask, position_ids=positions.clamp_min(0))
    mask = torch.cat([mask, turns[1]["attention_mask"]], 1)
    ids = turns[1]["input_ids"]
    for step in range(16):
        positions = (mask.cumsum(-1) - 1)[:, -ids.shape[1] :].clamp_min(0)
        logits = loop.feed(ids, attention_mask=mask, position_ids=positions)[:, -1]
        ids = logits.argmax(-1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        for row in range(2):
            expected = alone[row][0][1][step]
            torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=0)
    column = {j: int(n) for j, n in enumerate((mask.cumsum(-1) - 1)[1])}
    got = [[[column[j] for j in head] for head in layer] for layer in loop.kept(1)]
    assert got == alone[1][1].kept()


def test_b09_padding_of_a_finished_row_cannot_be_hidden_later(model):
    """generate() feeds pads to a finished row as real tokens; a mask that hides them comes late."""
    patched(model, "snapkv", 14)
    rows = [prompt(12), prompt(10, 1)]
    batch = left_padded(*rows)
    eos = int(greedy(model, rows[0]).tokens[0, 3])
    run = greedy(model, batch["input_ids"], eos_token_id=eos, **padding(batch))
    question = prompt(6, 4).expand(2, -1)
    text = torch.cat([run.sequences, question], 1)
    mask = torch.cat([batch["attention_mask"], (run.tokens != 0).long(), question * 0 + 1], 1)
    with pytest.raises(ValueError, match="cached token cannot be hidden"):
        greedy(model, text, attention_mask=mask, **{cache_key(model): run.cache})


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_b09_a_mask_of_a_step_cannot_hide_cached_tokens(policy, tokens, model):
    """One new token or several: a mask that does not show the cached ones is refused."""
    loop, ids = Loop(patched(model, policy, 14)), prompt(tokens, 1)
    loop.feed(prompt(24))
    hidden = torch.ones(1, 24 + tokens, dtype=torch.long)
    hidden[:, :9] = 0
    with pytest.raises(ValueError, match=r"cached, got \[15\]: a cached token cannot be hidden"):
        loop.feed(ids, attention_mask=hidden)
    with pytest.raises(ValueError, match=rf"padding mask \[1, {24 + tokens}\]"):
        loop.feed(ids, attention_mask=torch.ones_like(ids))
    last = torch.ones_like(hidden)
    last[:, -1] = 0
    with pytest.raises(ValueError, match="padding"):
        loop.feed(ids, attention_mask=last)
    plain = Loop(model)
    plain.feed(prompt(24))
    logits = loop.feed(ids, attention_mask=torch.ones_like(hidden))
    torch.testing.assert_close(logits, plain.feed(ids))
    assert loop.kept() == plain.kept()


def test_b09_padding_of_the_prompt_stays_padding(model):
    """A step's mask must not show what was padding, either; the right one is taken."""
    patched(model, "h2o", 14)
    batch, ids = left_padded(prompt(20), prompt(9, 1)), torch.tensor([[5], [7]])
    loop = Loop(model)
    loop.feed(batch["input_ids"], attention_mask=batch["attention_mask"])
    with pytest.raises(ValueError, match="cached token cannot be hidden"):
        loop.feed(ids, attention_mask=torch.ones(2, 21, dtype=torch.long))
    loop.feed(ids, attention_mask=torch.cat([batch["attention_mask"], ids * 0 + 1], 1))
    assert loop.cache.get_seq_length() == 21


def test_b09_a_bool_mask_serves_full_and_sliding_layers():
    """transformers hands one and the same bool mask to both kinds of layers."""
    loop = Loop(sparsekv.patch(build("gemma2"), "full"))
    batch, ids = left_padded(prompt(20), prompt(15, 1)), torch.tensor([[5], [7]])
    mask = batch["attention_mask"].bool()
    longer = torch.cat([mask, ids > 0], 1)
    logits = (
        loop.feed(batch["input_ids"], attention_mask=mask),
        loop.feed(ids, attention_mask=longer),
    )
    plain = Loop(loop.model)
    expected = plain.feed(batch["input_ids"], attention_mask=mask.long()), plain.feed(ids)
    torch.testing.assert_close(logits, expected, equal_nan=True)


@pytest.mark.parametrize("budget", [10, 40])
@pytest.mark.parametrize("policy", EVICTING)
def test_b03_chunked_prefill_of_a_padded_batch(policy, budget):
    """Pads make the chunks of short rows shorter; the reference is fed the same chunks."""
    model, stateful = tiny_llama(), POLICIES[policy].stateful
    references = [Reference(model, POLICIES[policy], budget) for _ in range(3)]
    rows = [prompt(34), prompt(32, 1), prompt(18, 2)]
    batch = left_padded(*rows)
    patched(model, policy, budget)
    new = 6
    run = greedy(model, batch["input_ids"], new, prefill_chunk_size=7, **padding(batch))
    for i, split in enumerate([(7, 7, 7, 7, 6), (5, 7, 7, 7, 6), (5, 7, 6)]):
        *chunks, last = rows[i].split(split, dim=1)
        for chunk in chunks:
            references[i].feed(chunk)
        tokens, logits = references[i].generate(last, new)
        assert run.tokens[i].tolist() == tokens
        torch.testing.assert_close(run.logits[:, i], logits, atol=1e-4, rtol=0)
        pads = 34 - rows[i].shape[1]
        shifted = [[[j + pads for j in head] for head in layer] for layer in references[i].kept()]
        assert kept(run.cache, i) == shifted
        for layer, heads in enumerate(references[i].heads if stateful else ()):
            for head, expected in enumerate(heads):
                scores = slot_scores(run.cache, layer, i, head)
                assert scores == pytest.approx(expected, abs=1e-5)
