"""Prompts and budgets around every threshold: windows, sinks, budgets, pages, one token.

One layer, so that many cases are cheap; each is a prompt and three steps against the reference.
"""

from __future__ import annotations

import pytest
import torch
from rig import Loop, every_token, prompt, tiny_llama
from zoo import NAMES, SUPPORT, example, truth

import sparsekv

BUDGETS = (1, 2, 4, 5, 15, 16, 17)
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 15, 16, 17, 18, 31, 33)


@pytest.mark.filterwarnings("ignore:pyramid gives all")
@pytest.mark.parametrize("name", NAMES)
def test_around_every_threshold(name):
    policy = example(name, layers=1)
    if SUPPORT[name]["loop"] == "refused" or name == "pyramidinfer":
        pytest.skip("has no manual loop, or no budget but its decay")
    model = tiny_llama(21, num_hidden_layers=1)
    for budget in BUDGETS:
        if name == "quest":  # its unit is a page; two always stay
            budget = 16 * (2 + budget % 3)
        sparsekv.patch(model, policy, budget)
        reference = truth(model, policy, budget)
        for length in LENGTHS:
            if name == "keydiff" and budget == 1:
                continue  # two keys are equally far from their mean: rounding would decide
            reference.reset()
            loop = Loop(model)
            first = every_token()[:, :length] if name == "knorm" else prompt(length, length)
            for ids in (first, *prompt(3, budget).split(1, dim=1)):
                where = f"budget {budget}, prompt {length}"
                expected, got = reference.feed(ids), loop.feed(ids)[0]
                assert loop.kept() == reference.kept(), where
                torch.testing.assert_close(got, expected, atol=1e-4, rtol=0, msg=where)


@pytest.mark.filterwarnings("ignore:pyramid gives all")
@pytest.mark.parametrize("budget", [0.1, 0.25, 0.8, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_fractions_of_the_prompt(name, budget):
    """A float is the fraction kept, and turns of other lengths have other budgets."""
    policy = example(name)
    if SUPPORT[name]["loop"] == "refused" or name in ("pyramidinfer", "quest"):
        pytest.skip("has no manual loop, or a unit of its own")
    model = tiny_llama(22)
    sparsekv.patch(model, policy, budget)
    reference, loop = truth(model, policy, budget), Loop(model)
    for length, steps in ((31, 9), (6, 3), (24, 3)):
        for ids in (prompt(length, steps), *prompt(steps, length).split(1, dim=1)):
            expected, got = reference.feed(ids), loop.feed(ids)[0]
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
            assert loop.kept() == reference.kept()
