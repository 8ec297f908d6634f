"""A prompt that was recorded once leaves in a cache what the model would have left in it."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from families import build
from rig import tiny_llama
from zoo import NAMES, example

import sparsekv
from sparsekv.hf.compat import cache_key
from sparsekv.hf.recording import extend, record, replay, replayable

BUDGET = 12
REPLAYED = [name for name in NAMES if name not in ("keydiff", "pyramidinfer")]


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Ids, mask and lengths of left-padded rows."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask, np.array([len(row) for row in rows])


def positions(mask: torch.Tensor, start: int | list[int] = 0) -> torch.Tensor:
    """Positions of the tokens of padded rows that begin at `start`."""
    return (mask.cumsum(-1) - 1).clamp_min(0) + torch.tensor(start).view(-1, 1)


def recorded(model, rows: list[list[int]]):
    ids, mask, lengths = padded(rows)
    return record(model, ids, positions(mask), lengths)


def extended(model, recording, places: list[int], rows: list[list[int]]):
    ids, mask, lengths = padded(rows)
    start = recording.lengths[places].tolist()
    return extend(model, recording, places, ids, positions(mask, start), lengths)


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    """No id twice in a prompt: keys of one token have one norm, and rounding would rank them."""
    rng = np.random.default_rng(seed)
    return [(rng.permutation(126)[:n] + 2).tolist() for n in lengths]


def fed(model, cache, ids, mask, columns):
    """Logits of the newest columns."""
    at = positions(mask)[:, columns:]
    with torch.no_grad():
        return model(
            input_ids=ids, attention_mask=mask, position_ids=at, use_cache=True,
            **{cache_key(model): cache},
        ).logits  # fmt: skip


def same(model, one, other, mask, rows):
    """Kept positions, report, and the logits of a chunk and of a step."""
    for layer in range(len(one.layers)):
        for row in range(rows):
            for head in range(2):
                assert one.kept_positions(layer, row, head) == other.kept_positions(
                    layer, row, head
                )
    assert one.report() == other.report()
    columns = mask.shape[1]
    for tokens in (5, 1):
        ids = torch.arange(tokens * rows).view(rows, tokens) % 100 + 2
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        got, expected = (fed(model, cache, ids, mask, columns) for cache in (one, other))
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
        columns += tokens


@pytest.mark.parametrize("name", REPLAYED)
def test_replay_is_the_prompt(name):
    model = sparsekv.patch(tiny_llama(), example(name), BUDGET)
    rows = prompts(1, 40, 23, 9)
    recording, (ids, mask, _) = recorded(model, rows), padded(rows)
    one, other = sparsekv.new_cache(model), sparsekv.new_cache(model)
    replay(recording, one)
    fed(model, other, ids, mask, 0)
    if name == "kvzip":
        for cache in (one, other):
            sparsekv.compress(model, cache, ids, mask)
    same(model, one, other, mask, 3)


def test_a_recording_is_freed_when_nobody_holds_it():
    """Whole prompts of an evaluation once stayed for good: keys led back to who had kept them."""
    model = sparsekv.patch(tiny_llama(), "snapkv", BUDGET)
    recording = recorded(model, prompts(3, 40, 23))
    longer = extended(model, recording, [0, 1], prompts(4, 7, 7))
    held = [
        weakref.ref(tensor)
        for layer in (*recording.layers, *longer.layers)
        for tensor in (layer.q, layer.k, layer.v)
    ]
    del recording, longer
    assert [ref() for ref in held] == [None] * len(held)


@pytest.mark.parametrize("name", REPLAYED)
def test_extended_is_the_longer_prompt(name):
    """Three questions about two contexts, one of them empty."""
    model = sparsekv.patch(tiny_llama(), example(name), BUDGET)
    whole = prompts(2, 47, 30, 45)
    contexts, places, cuts = [whole[1][:23], whole[0][:40]], [1, 0, 1], [40, 23, 40]
    whole[2][:40] = contexts[1]
    whole[2][40:] = [token for token in range(2, 128) if token not in contexts[1]][:5]
    first = recorded(model, contexts)
    questions = [row[cut:] for row, cut in zip(whole, cuts, strict=True)]
    recording = extended(model, first, places, questions)
    ids, mask, lengths = padded(whole)
    assert (recording.lengths == lengths).all()
    one, other = sparsekv.new_cache(model), sparsekv.new_cache(model)
    replay(recording, one)
    fed(model, other, ids, mask, 0)
    if name == "kvzip":
        for cache in (one, other):
            sparsekv.compress(model, cache, ids, mask)
    same(model, one, other, mask, 3)


def test_rows_are_views_of_their_prompts():
    model = sparsekv.patch(tiny_llama(), "full", 1)
    rows = prompts(3, 20, 12, 17)
    recording, (ids, mask, _) = recorded(model, rows), padded(rows)
    some = sparsekv.new_cache(model)
    part = recording.rows(1, 3)
    assert part.layers[0].q.data_ptr() != recording.layers[0].q.data_ptr()
    assert part.layers[0].q._base is not None
    replay(part, some)
    other = sparsekv.new_cache(model)
    fed(model, other, ids[1:], mask[1:], 0)
    same(model, some, other, mask[1:], 2)


@pytest.mark.parametrize("name", ["keydiff", "pyramidinfer"])
def test_policies_that_change_a_prompt_are_refused(name):
    model = sparsekv.patch(tiny_llama(), example(name), BUDGET)
    assert not replayable(example(name))
    recording = recorded(model, prompts(4, 30))
    with pytest.raises(ValueError, match="expected a replayable policy, got"):
        replay(recording, sparsekv.new_cache(model))


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_models_with_windows_softcaps_and_sinks(family):
    """Their own geometry is recorded, too: gpt-oss has sinks, Gemma 2 softcaps, both windows."""
    model = sparsekv.patch(build(family), example("snapkv"), BUDGET)
    whole = prompts(5, 47, 40)
    first = recorded(model, [whole[0][:30], whole[1][:33]])
    recording = extended(model, first, [0, 1], [whole[0][30:], whole[1][33:]])
    ids, mask, _ = padded(whole)
    one, other = sparsekv.new_cache(model), sparsekv.new_cache(model)
    replay(recording, one)
    fed(model, other, ids, mask, 0)
    same(model, one, other, mask, 2)
