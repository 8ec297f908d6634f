"""Batches are made by lengths alone, and no result depends on them."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from eval_rig import made_up
from hypothesis import given
from hypothesis import strategies as st
from zoo import example

from sparsekv.evaluation.batches import agnostic_groups, aware_groups, batches, by_length, grouped
from sparsekv.evaluation.records import PROTOCOLS
from sparsekv.evaluation.runner import default_batch_tokens, evaluate, recorded_bytes
from sparsekv.policies import PyramidInfer

SIZES = st.lists(st.integers(1, 50), max_size=30)


@given(sizes=SIZES, limits=st.tuples(st.integers(1, 200), st.integers(1, 400)))
def test_groups_are_runs_within_their_limits(sizes, limits):
    both = [(lambda n: n, limits[0]), (lambda n: 3 * n, limits[1])]
    groups = grouped(sizes, both)
    assert [n for group in groups for n in group] == sizes
    for group in groups:
        padded = max(group) * len(group)
        assert len(group) == 1 or (padded <= limits[0] and 3 * padded <= limits[1])
    for one, other in pairwise(groups):  # as few as the order allows
        more = [*one, other[0]]
        assert any(size(max(more)) * len(more) > most for size, most in both)


@given(sizes=SIZES)
def test_rows_of_one_length(sizes):
    groups = list(by_length(range(len(sizes)), lambda i: sizes[i]))
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
    assert all(len({sizes[i] for i in group}) == 1 for group in groups)
    assert len(groups) == len(set(sizes))


@given(tokens=st.integers(1, 500))
def test_every_question_is_asked_once_under_both_protocols(tokens):
    task = made_up("choice", contexts=4)
    expected = sorted((e.id, q.id) for e in task.examples for q in e.questions)
    for groups in (agnostic_groups, aware_groups):
        found = [
            (a.example.id, a.question.id)
            for batch in batches(task, tokens)
            for group in groups(batch, 260, tokens)
            for a in group
        ]
        assert sorted(found) == expected


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", ["full", "snapkv", "adakv", "keydiff", "quest", "pyramidinfer"])
def test_results_do_not_depend_on_batches(subject, name, protocol):
    """One question at a time, two contexts at a time, all at once."""
    task, policy = made_up(), example(name, layers=2)
    one, some, every = (
        {r.key: r for r in evaluate(*subject, task, policy, 12, protocol, batch_tokens=tokens)}
        for tokens in (1, 100, 1 << 20)
    )
    assert one.keys() == some.keys() == every.keys()
    for key, record in one.items():
        for other in (some[key], every[key]):
            assert other.nll == pytest.approx(record.nll, abs=1e-4)
            assert (other.em, other.right_tokens) == (record.em, record.right_tokens)
            assert (other.kept, other.note) == (record.kept, record.note)


def test_pyramidinfer_gets_the_least_budget_that_it_takes(subject):
    """Its tail alone is a fifth of the prompt; the record says what was used."""
    policy = PyramidInfer(min_context=2, sinks=1)
    found = evaluate(*subject, made_up(), policy, 4, "question-agnostic")
    for record in found:
        assert record.budget == 4 and record.kept > 4
        assert record.note is not None and "least budget" in record.note
        least = int(record.note.split()[-1])
        for tokens in {len(e.context) for e in made_up().examples}:
            if f"for {tokens} tokens" in record.note:
                policy.layer_tokens(2, tokens, least)
                with pytest.raises(ValueError, match="expected a budget of at least"):
                    policy.layer_tokens(2, tokens, least - 1)


def test_batches_fit_the_memory_of_a_gpu(subject, monkeypatch):
    """A third of what is free, for two batches; SmolLM2-135M has 57 600 bytes a token in bf16."""
    model, _ = subject
    assert default_batch_tokens(model) == 8192
    config = SimpleNamespace(
        num_attention_heads=9, num_key_value_heads=3, head_dim=64, num_hidden_layers=30
    )
    assert recorded_bytes(config, torch.bfloat16) == 57_600
    device = SimpleNamespace(type="cuda")
    gpu = SimpleNamespace(device=device, config=config, dtype=torch.bfloat16)
    for free, tokens in ((140 << 30, 131072), (20 << 30, 32768), (1 << 20, 1024)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, free))
        assert default_batch_tokens(gpu) == tokens
        assert tokens == 1024 or 2 * tokens * 57_600 <= free / 3
