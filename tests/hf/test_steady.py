"""Decode steps with fixed shapes: the same results as ordinary ones, and the host keeps count."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from rig import POLICIES, Loop, kept, patched, prompt, tiny_llama

import sparsekv
from sparsekv.policies import H2O
from sparsekv.steady import HostCount, addresses, advance, hold

_BUDGETS = [16, 44, 200]  # in use from the first step, from the fifth, never


def _begun(policy: str, budget: int) -> Loop:
    loop = Loop(patched(tiny_llama(), policy, budget))
    loop.feed(prompt(40))
    return loop


@pytest.mark.parametrize("budget", _BUDGETS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("first", [0, 2])
def test_steady_steps_equal_ordinary_steps(policy, budget, first):
    """Every branch that a steady step leaves to the device is taken as the host would."""
    ordinary, steady = _begun(policy, budget), _begun(policy, budget)
    ids = prompt(30, seed=9)
    for i in range(30):
        if i in (first, first + 12):
            hold(steady.cache.state, 12)
        expected = ordinary.feed(ids[:, i : i + 1])
        torch.testing.assert_close(steady.feed(ids[:, i : i + 1]), expected, atol=1e-5, rtol=1e-5)
        assert kept(steady.cache) == kept(ordinary.cache)
    steady.cache.state.stores[0].validate()


@pytest.mark.parametrize("budget", _BUDGETS)
@pytest.mark.parametrize("policy", POLICIES)
def test_memory_stays_where_it_is(policy, budget):
    """What a graph was captured with is what later steps use."""
    loop = _begun(policy, budget)
    hold(loop.cache.state, 20)
    before = addresses(loop.cache.state)
    for token in prompt(20, seed=9)[0]:
        loop.feed(token.view(1, 1))
        assert addresses(loop.cache.state) == before
    assert loop.cache.state.held_steps == 0


@pytest.mark.parametrize("budget", _BUDGETS)
@pytest.mark.parametrize("policy", POLICIES)
def test_advance_counts_as_a_step_does(policy, budget):
    """The host's share of a replayed step."""
    loop = _begun(policy, budget)
    hold(loop.cache.state, 12)
    for token in prompt(12, seed=9)[0]:
        counted = copy.deepcopy(loop.cache.state)
        advance(counted)
        loop.feed(token.view(1, 1))
        state = loop.cache.state
        assert counted.seen == state.seen and counted.held_steps == state.held_steps
        assert (counted.tokens == state.tokens).all()
        assert (counted.stores[0].lens == state.stores[0].lens).all()


class _SlowH2O(H2O):
    """H2O whose decode step is not declared as a decay, so that torch does it."""

    def observe(self, layer, phase, state, columns, positions):
        return state + columns

    def decay(self, layer):
        return None


@pytest.mark.parametrize("steady", [False, True])
def test_a_kernel_step_equals_observe(steady):
    """`decay` is a short cut for `observe`, and nothing else."""
    loops = [Loop(sparsekv.patch(tiny_llama(), policy, 24)) for policy in (H2O(), _SlowH2O())]
    for ids in (prompt(40), *prompt(20, seed=9).T[..., None]):
        quick, slow = (loop.feed(ids) for loop in loops)
        torch.testing.assert_close(quick, slow, atol=1e-5, rtol=1e-5)
        assert kept(loops[0].cache) == kept(loops[1].cache)
        if steady and ids.shape[1] > 1:
            for loop in loops:
                hold(loop.cache.state, 12)


def test_a_failed_capture_leaves_no_trace():
    """Python ran the step, the device did not: the host forgets it."""
    loop = _begun("h2o", 16)
    hold(loop.cache.state, 12)
    state = loop.cache.state
    before, lens = HostCount.of(state), state.stores[0].lens.copy()
    advance(state)
    before.put_back(state)
    assert state.seen == [40] * 3 and state.held_steps == 12
    assert np.array_equal(state.stores[0].lens, lens)


def test_after_the_held_steps_pages_are_found_as_usual():
    """A cache that was held for a few steps decodes on."""
    loop = _begun("full", 16)
    hold(loop.cache.state, 2)
    for token in prompt(40, seed=9)[0]:
        loop.feed(token.view(1, 1))
    assert loop.cache.report().kept.min == 80
    loop.cache.state.stores[0].validate()
