"""PyramidInfer's arithmetic: published schedules, the decay that a budget pays for."""

from __future__ import annotations

import math

import pytest
import torch
from harness import golden_prefill, shape
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.policies import LayerPlan, PyramidInfer
from sparsekv.pruning import Pruning, _choose


def test_the_worked_schedule():
    policy = PyramidInfer(decay=0.5, min_context=0)
    assert policy.layer_tokens(4, 20, 1) == (20, 20, 18, 14)
    assert policy.tail(20) == 5
    plan = policy.plan(shape(4), 20, 1)
    assert plan == tuple(LayerPlan(None, prefill=n) for n in (20, 20, 18, 14))


@pytest.mark.parametrize(
    ("size", "layers", "mean", "last"),
    [("7B", 32, 0.765, 0.375), ("13B", 40, 0.723, 0.301), ("70B", 80, 0.780, 0.401)],
)
def test_released_configurations(size, layers, mean, last):
    counts = PyramidInfer.published(size).layer_tokens(layers, 2048, 1)
    assert round(sum(counts) / layers / 2048, 3) == mean
    assert round(counts[-1] / 2048, 3) == last
    if size == "7B":
        assert counts[:4] == (2048, 2048, 2047, 2045)


@given(data=st.data())
def test_the_decay_is_the_largest_that_the_budget_pays_for(data):
    layers, tokens = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3000))
    budget = data.draw(st.integers(1, tokens))
    least = data.draw(st.sampled_from([0, 8, 64]))
    policy = PyramidInfer(min_context=least, interval=data.draw(st.integers(1, 3)))
    sums = {
        step: sum(by(policy, step / 4096).layer_tokens(layers, tokens, budget))
        for step in [*data.draw(st.lists(st.integers(0, 4096), max_size=8)), 0, 4096]
    }
    try:
        counts = policy.layer_tokens(layers, tokens, budget)
    except ValueError as error:
        assert "expected a budget of at least" in str(error)
        assert min(sums.values()) > layers * budget
        return
    assert sum(counts) <= layers * budget
    assert max(total for total in sums.values() if total <= layers * budget) <= sum(counts)
    assert counts[0] == tokens and list(counts) == sorted(counts, reverse=True)
    assert counts[-1] >= policy.tail(tokens)


def by(policy, decay):
    fields = {name: getattr(policy, name) for name in ("min_context", "interval")}
    return PyramidInfer(decay=decay, **fields)


@pytest.mark.parametrize("decay", [None, 0.3])
def test_within_the_budget_nothing_is_dropped(decay):
    policy = PyramidInfer(decay=decay, min_context=0)
    assert policy.layer_tokens(8, 100, 100) == (100,) * 8
    assert policy.layer_tokens(8, 101, 100) != (101,) * 8


def test_the_worked_example_keeps_the_best_context():
    """Rows 6 and 7 of the worked example by weights 1 and 1.2; one sink."""
    policy = PyramidInfer(distance_weight=1.2, sinks=1)
    tail = golden_prefill()[:, 6:].mean(0).float()  # [2, 8]
    scores = policy.weights(2) @ tail
    expected = torch.tensor([0.0612, 0.0996, 0.2218, 0.1348, 0.0891, 0.1803])
    torch.testing.assert_close(scores[:6] / 2, expected, atol=5e-5, rtol=0)
    pruning = Pruning(8, 2, (8, 5))
    _choose(pruning, 0, scores[None], policy.sinks)
    assert pruning.places.tolist() == [[0, 2, 5, 6, 7]]
    assert torch.equal(pruning.chosen, pruning.places)


def test_ties_keep_the_newest_and_sinks_stay():
    pruning = Pruning(10, 2, (10, 6, 5))
    _choose(pruning, 0, torch.ones(1, 10), 2)
    assert pruning.places.tolist() == [[0, 1, 6, 7, 8, 9]]
    _choose(pruning, 1, torch.ones(1, 6), 2)
    assert pruning.chosen.tolist() == [[0, 1, 3, 4, 5]]
    assert pruning.places.tolist() == [[0, 1, 7, 8, 9]]


@given(layer=st.integers(0, 31), exceed=st.integers(1, 64), decay=st.floats(0, 1))
def test_a_window_of_generated_tokens_keeps_at_least_one(layer, exceed, decay):
    policy = PyramidInfer(exceed=exceed, gen_decay=decay)
    ratio = (1 - decay) * (math.cos(math.pi * layer / 32) + 1) / 2 + decay
    assert policy.generated(layer, 32) == max(int(exceed * (0.9 * ratio)), 1) <= exceed


@pytest.mark.parametrize(
    "wrong",
    [
        {"recent": 1.5}, {"decay": -0.1}, {"interval": 0}, {"sinks": -1}, {"min_context": -1},
        {"distance_weight": 0.0}, {"gen_decay": 2.0}, {"gen_keep": float("nan")}, {"exceed": 0},
    ],
)  # fmt: skip
def test_bad_hyper_parameters(wrong):
    with pytest.raises(ValueError, match=r"expected .*, got "):
        PyramidInfer(**wrong)


def test_unknown_sizes():
    with pytest.raises(ValueError, match="7B, 13B or 70B, got '3B'"):
        PyramidInfer.published("3B")
