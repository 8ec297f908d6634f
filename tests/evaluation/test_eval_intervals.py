"""Bootstrap intervals against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sparsekv.evaluation.intervals import Sums, interval

VALUES = arrays(float, st.integers(1, 12), elements=st.floats(-5, 5))


def test_one_question_a_context_has_the_standard_error_of_a_mean():
    rng = np.random.default_rng(1)
    values = rng.normal(2.0, 3.0, 400)
    draws = Sums(values, np.ones(400)).draws()
    expected = values.std() / 20
    assert draws.std() == pytest.approx(expected, rel=0.05)
    low, high = interval(draws)
    assert low == pytest.approx(values.mean() - 1.96 * expected, abs=0.1 * expected)
    assert high == pytest.approx(values.mean() + 1.96 * expected, abs=0.1 * expected)


def test_questions_of_a_context_stand_or_fall_together():
    """Ten copies of each answer tell no more than one."""
    values = np.random.default_rng(2).integers(0, 2, 50).astype(float)
    one, ten = Sums(values, np.ones(50)), Sums(10 * values, np.full(50, 10))
    assert interval(one.draws()) == pytest.approx(interval(ten.draws()))


def test_one_context_says_nothing_about_others():
    assert interval(Sums(np.array([3.0]), np.array([4])).draws()) == (0.75, 0.75)


@given(values=VALUES, shift=st.floats(-3, 3))
def test_a_constant_difference_has_no_spread(values, shift):
    """Draws are paired: both settings are drawn with the same contexts."""
    count = np.arange(1, len(values) + 1)
    own, other = Sums(values, count), Sums(values + shift * count, count)
    low, high = interval(other.draws() - own.draws())
    assert low == pytest.approx(shift, abs=1e-9) and high == pytest.approx(shift, abs=1e-9)


@given(values=VALUES)
def test_draws_stay_between_the_contexts(values):
    count = np.arange(1, len(values) + 1)
    draws = Sums(values * count, count).draws()
    assert draws.min() >= values.min() - 1e-9 and draws.max() <= values.max() + 1e-9


def test_tasks_are_drawn_independently():
    """Context 3 of one task has nothing to do with context 3 of another: of a mean over tasks the
    variance is that of each, by their number, however the contexts happen to be numbered."""
    values = np.random.default_rng(3).normal(size=8)
    for other in (values, -values, np.sort(values)):
        both = Sums(values, np.ones(8)).draws("a") + Sums(other, np.ones(8)).draws("b")
        assert both.std() == pytest.approx(values.std() / 2, rel=0.06)  # sqrt(2) / sqrt(8)
    assert (Sums(values, np.ones(8)).draws("a") == Sums(values, np.ones(8)).draws("a")).all()
