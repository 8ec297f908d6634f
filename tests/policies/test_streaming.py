"""StreamingLLM: sinks and the newest tokens."""

from __future__ import annotations

import pytest
import torch
from harness import golden_decode, golden_prefill, prefill, shape
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.policies import LayerPlan, Stats, Streaming


def test_golden_prefill_and_decode():
    row = prefill(Streaming(sinks=1), golden_prefill(), budget=4)
    assert row.kept() == [[0, 5, 6, 7]]
    row.decode(8, golden_decode)
    assert row.kept() == [[0, 6, 7, 8]]


@pytest.mark.parametrize("positions", ["original", "cache"])
def test_positions_set_only_the_flag_that_the_runtime_reads(positions):
    policy = Streaming(positions=positions)
    assert policy.rerotates_sinks is (positions == "cache")
    assert policy.plan(shape(2), 100, 16) == Streaming().plan(shape(2), 100, 16)


@given(budget=st.integers(1, 12), sinks=st.integers(0, 8), tokens=st.integers(1, 30))
def test_kept_set_at_every_step(budget, sinks, tokens):
    # A budget of at most `sinks` keeps the current token and gives up sinks.
    uniform = torch.ones(2, tokens, tokens)
    row = prefill(Streaming(sinks=sinks), uniform, budget)
    first = min(sinks, budget - 1)
    for token in range(tokens, tokens + 20):
        row.decode(token, lambda positions: torch.ones(2, positions.shape[-1]))
        seen = range(token + 1)
        expected = list(seen) if token < budget else [*seen[:first], *seen[first - budget :]]
        assert row.kept() == [expected]


def test_plan():
    assert Streaming().plan(shape(2), 99, 16) == (LayerPlan(16, 4, 12, "replace"),) * 2
    assert Streaming().plan(shape(1), 99, 4) == (LayerPlan(4, 3, 1, "replace"),)


def test_newer_scores_higher_without_help_from_protection():
    # fp32 tells positions apart where bf16 and fp16 do not.
    positions = torch.tensor([[[2**24 - 2, 2**24 - 1]]], dtype=torch.int32)
    lengths, recent = torch.tensor([[2]]), torch.tensor([0])
    older, newer = Streaming().score(0, Stats(None, None, positions, lengths, recent))[0, 0]
    assert older < newer
    assert Streaming().evicts_by == "position"
