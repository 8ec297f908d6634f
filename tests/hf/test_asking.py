"""A question that is asked gets the logits of a chunk fed to a fork of the cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import build
from rig import POLICIES as FIXED
from rig import tiny_llama
from test_recording import fed, padded, prompts, recorded
from zoo import NAMES, example

import sparsekv
from sparsekv.hf.asking import Asking, askable
from sparsekv.hf.recording import replay

BUDGET = 12
ASKED = [name for name in NAMES if name not in ("keydiff", "pyramidinfer")]
PLACES = [0, 0, 1, 2, 2, 2]
QUESTIONS = [[5, 9], [7], [11, 12, 13, 14, 15], [3], [60, 61, 62], [9, 8, 7, 6]]


def cached(model, kvzip: bool):
    """Three compressed contexts, their mask."""
    rows = prompts(1, 40, 23, 9)
    ids, mask, _ = padded(rows)
    cache = sparsekv.new_cache(model)
    replay(recorded(model, rows), cache)
    if kvzip:
        sparsekv.compress(model, cache, ids, mask)
    return cache, mask


def as_chunk(model, cache, mask, places, rows):
    """Logits [R, T, V] of forks that are fed padded rows, and their mask."""
    cache.state.select_rows(np.array(places))
    cache.state.chunked_until = 1 << 30
    ids, new, _ = padded(rows)
    whole = torch.cat([mask[torch.tensor(places)], new], 1)
    return fed(model, cache, ids, whole, mask.shape[1]), whole


def check(model, kvzip=False):
    cache, mask = cached(model, kvzip)
    other, _ = cached(model, kvzip)
    report = cache.report()
    ids, real, lengths = padded(QUESTIONS)
    got = Asking(model, cache).ask(PLACES, ids, lengths, ids.shape[1])
    expected, _ = as_chunk(model, other, mask, PLACES, QUESTIONS)
    keep = real.bool()
    torch.testing.assert_close(got[keep], expected[keep], atol=2e-5, rtol=0)
    assert cache.report() == report  # asking stores nothing


@pytest.mark.parametrize("name", ASKED)
def test_asking_is_a_chunk_on_a_fork(name):
    check(sparsekv.patch(tiny_llama(), example(name), BUDGET), name == "kvzip")


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "mistral-window"])
def test_windows_softcaps_and_sinks(family):
    check(sparsekv.patch(build(family), example("snapkv"), BUDGET))


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2"])
def test_rows_go_on_from_what_was_remembered(family):
    """What questions begin with, questions, choices: as all of it in one chunk."""
    model = build(family) if family != "llama" else tiny_llama()
    model = sparsekv.patch(model, example("snapkv"), BUDGET)
    cache, mask = cached(model, False)
    other, _ = cached(model, False)
    asking = Asking(model, cache)
    starts = [[50, 51, 52], [53], [54, 55]]
    after, choices = [0, 1, 1, 3, 3, 3, 4, 5], [[20 + i] * (1 + i % 3) for i in range(8)]
    for places, rows in (([0, 1, 2], starts), (PLACES, QUESTIONS)):
        ids, _, lengths = padded(rows)
        asking.ask(places, ids, lengths, 1, remember=True)
    ids, _, lengths = padded(choices)
    got = asking.ask(after, ids, lengths, ids.shape[1])
    whole = [
        starts[PLACES[i]] + QUESTIONS[i] + choice for i, choice in zip(after, choices, strict=True)
    ]
    expected, _ = as_chunk(model, other, mask, [PLACES[i] for i in after], whole)
    for row, choice in enumerate(choices):
        n = len(choice)
        torch.testing.assert_close(got[row, -n:], expected[row, -n:], atol=2e-5, rtol=0)


def test_what_is_not_askable():
    """Policies that drop while a chunk is read, keys that move along with the newest, and chunks
    that are read as they are quantised."""
    model = tiny_llama()
    for policy in (example("keydiff"), example("pyramidinfer"), FIXED["streaming-cache"]):
        assert not askable(sparsekv.new_cache(sparsekv.patch(model, policy, BUDGET)))
    quantised = sparsekv.patch(model, example("snapkv"), BUDGET, kv_dtype="int8")
    assert not askable(sparsekv.new_cache(quantised))
    for name in ASKED:
        assert askable(sparsekv.new_cache(sparsekv.patch(model, example(name), BUDGET)))
