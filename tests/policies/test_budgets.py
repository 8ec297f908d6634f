"""Budgets are exact: rounding, sums, order and caps."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.policies.budgets import (
    largest_remainder,
    pyramid_exact,
    pyramid_official,
    resolve_budget,
)

fractions_kept = st.integers(1, 1000).map(lambda n: n / 1000)


@pytest.mark.parametrize(
    ("budget", "tokens", "slots"),
    [
        (0.2, 100, 20),  # 1 - .8 in binary is below .2: truncation keeps 19
        (0.1, 100, 10),
        (0.29, 100, 29),  # .29 * 100 = 28.999999999999996
        (0.5, 3, 2),  # half up, not half to even
        (0.5, 5, 3),
        (0.145, 100, 15),  # 14.499999999999998 in floats
        (1e-9, 1000, 1),  # never an empty cache
        (0.5, 0, 1),
        (1.0, 77, 77),
        (1, 77, 1),  # the int 1 is one slot
        (512, 77, 512),  # room to grow
    ],
)
def test_resolve_budget_examples(budget, tokens, slots):
    assert resolve_budget(budget, tokens) == slots


@pytest.mark.parametrize("budget", [0, -1, 0.0, -0.1, 1.5, math.nan, math.inf, True, False, "8"])
def test_resolve_budget_rejects(budget):
    with pytest.raises(ValueError, match=r"expected .*budget .*got"):
        resolve_budget(budget, 100)


@given(fractions_kept, fractions_kept, st.integers(0, 100_000), st.integers(0, 100_000))
def test_resolve_budget_is_monotone(kept, more, tokens, longer):
    kept, more = sorted((kept, more))
    tokens, longer = sorted((tokens, longer))
    assert resolve_budget(kept, tokens) <= resolve_budget(more, tokens)
    assert resolve_budget(kept, tokens) <= resolve_budget(kept, longer)
    assert 1 <= resolve_budget(more, longer) <= max(1, longer)


@given(st.lists(st.fractions(0, 100), min_size=1, max_size=20))
def test_largest_remainder_sums_and_rounds_by_less_than_one(targets):
    total = math.floor(sum(targets))
    rounded = largest_remainder(targets, total)
    assert sum(rounded) == total
    assert all(abs(r - t) < 1 for r, t in zip(rounded, targets, strict=True))


def test_largest_remainder_ties_and_impossible_totals():
    assert largest_remainder([Fraction(5, 2)] * 4, 10) == [3, 3, 2, 2]
    with pytest.raises(ValueError, match="expected targets that sum to 13, got 10"):
        largest_remainder([Fraction(5), Fraction(5)], 13)


def without_window(budgets, window):
    return [budget - window for budget in budgets]


def test_pyramid_exact_golden():
    assert without_window(pyramid_exact(4, 20, 6, 2, 20), 2) == [8, 5, 3, 0]
    assert pyramid_exact(4, 8, 6, 2, 20) == [8, 7, 5, 4]  # clamped at all 8 tokens, mean 6
    assert pyramid_exact(32, 300, 240, 8, 20)[::31] == [300, 180]


@pytest.mark.parametrize(
    ("tokens", "counts"),
    [(20, [8, 6, 4, 2]), (8, [6, 5, 4, 3]), (7, [4, 4, 4, 4]), (6, [4] * 4), (5, [4] * 4)],
)
def test_pyramid_official_small_golden(tokens, counts):
    # T = 7 is the uniform branch, T = 5 < C is dense (a budget above the row keeps all of it).
    assert without_window(pyramid_official(4, tokens, 6, 2, 20), 2) == counts


def test_pyramid_official_32_layers_golden():
    counts = without_window(pyramid_official(32, 8000, 128, 8, 20), 8)
    assert (counts[0], counts[-1], sum(counts)) == (234, 17, 4016)
    assert without_window(pyramid_official(32, 4079, 2048, 8, 20), 8) == [2040] * 32
    counts = without_window(pyramid_official(32, 4080, 2048, 8, 20), 8)
    assert (counts[:2], counts[-1]) == ([3978, 3853], 103)


@pytest.mark.parametrize(
    ("budget", "mean32", "mean80"),
    [
        (64, 71.5, 78.5),
        (96, 102.5, 101.0),
        (128, 133.5, 163.0),
        (256, 259.5, 294.5),
        (512, 526.0, 517.0),
        (1024, 1029.0, 1042.0),
        (2048, 2048.5, 2050.5),
    ],
)
def test_pyramid_official_is_over_budget_and_exact_is_not(budget, mean32, mean80):
    for layers, mean in ((32, mean32), (80, mean80)):
        assert sum(pyramid_official(layers, 8000, budget, 8, 20)) == mean * layers
        assert sum(pyramid_exact(layers, 8000, budget, 8, 20)) == budget * layers


@given(
    layers=st.integers(1, 81),
    tokens=st.integers(1, 5000),
    budget=st.integers(1, 3000),
    window=st.integers(1, 64),
    beta=st.integers(2, 40),
)
def test_pyramid_exact_properties(layers, tokens, budget, window, beta):
    budgets = pyramid_exact(layers, tokens, budget, window, beta)
    assert sum(budgets) == layers * budget
    assert budgets == sorted(budgets, reverse=True)
    if tokens > budget:
        assert all(1 <= slots <= tokens for slots in budgets)
        # A pyramid exists as soon as there is more to share than the window.
        assert (budgets[0] > budgets[-1]) == (layers > 1 and budget > window)
    else:
        assert min(budgets) >= tokens


@given(
    layers=st.integers(1, 81),
    tokens=st.integers(1, 5000),
    budget=st.integers(1, 3000),
    window=st.integers(1, 64),
)
def test_pyramid_official_never_underspends(layers, tokens, budget, window):
    budgets = pyramid_official(layers, tokens, budget, window, 20)
    assert sum(budgets) >= layers * budget
    assert budgets == sorted(budgets, reverse=True)
    assert min(budgets) >= min(window, budget)
    assert tokens <= budget or max(budgets) <= tokens


@given(budget=st.integers(30, 3000), window=st.integers(1, 29), over=st.integers(1, 4000))
def test_official_clamp_is_reachable_only_in_a_sliver(budget, window, over):
    # Above the uniform branch the clamp changes something iff T < 2B - B // beta + w.
    free = budget - window
    tokens = max(2 * free, budget) + over
    clamped = pyramid_official(2, tokens, budget, window, 20)[0] < 2 * free - free // 20 + window
    assert clamped == (tokens < 2 * free - free // 20 + window)
