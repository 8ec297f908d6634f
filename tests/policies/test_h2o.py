"""H2O: accumulated attention and the newest tokens."""

from __future__ import annotations

import pytest
import torch
from harness import (
    columns,
    golden_decode,
    golden_prefill,
    prefill,
    shape,
)

from sparsekv.policies import H2O, Need


def test_golden_statistics():
    sums = columns(golden_prefill(), Need("sum"), num_kv_heads=2)[0]
    h0 = [2.2610, 3.2345, 0.9244, 0.1553, 0.2314, 0.0615, 0.7612, 0.3707]
    h1 = [3.3861, 0.9783, 1.3897, 0.5781, 1.0190, 0.6116, 0.0296, 0.0075]
    torch.testing.assert_close(sums, torch.tensor([h0, h1]), rtol=0, atol=6e-5)
    torch.testing.assert_close(sums.sum(-1), torch.full((2,), 8.0))  # one unit of mass a row


def test_golden_prefill_and_decode():
    row = prefill(H2O(), golden_prefill(), budget=4)
    assert row.kept() == [[0, 1, 6, 7]]
    row.decode(8, golden_decode)
    assert row.kept() == [[0, 1, 7, 8]]  # 6 left the recent window with .4692
    accumulated = torch.tensor([[[3.4133, 2.3948, 0.2220, 0.0152]]])
    torch.testing.assert_close(row.state, accumulated, rtol=0, atol=6e-5)


def test_golden_per_query_head():
    # The paper's granularity, had each query head a KV head of its own.
    row = prefill(H2O(), golden_prefill(), budget=4, num_kv_heads=2)
    assert row.kept() == [[0, 1, 6, 7], [0, 2, 6, 7]]


def test_sum_and_mean_over_the_group_rank_alike():
    kept = [prefill(H2O(group=g), golden_prefill(), 5).kept() for g in ("mean", "sum")]
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    ("budget", "heavy_fraction", "recent"),
    [(200, 0.5, 100), (5, 0.5, 3), (100, 0.29, 71), (8, 0.0, 8), (8, 1.0, 0), (1, 0.5, 1)],
)
def test_budget_split(budget, heavy_fraction, recent):
    # First row: "20 % cache" of 1000 tokens is 100 heavy and 100 recent. .29: no float truncation.
    plan = H2O(heavy_fraction=heavy_fraction).plan(shape(3), 1000, budget)
    assert len(plan) == 3
    assert {(p.budget, p.recent, p.sinks, p.decode) for p in plan} == {(budget, recent, 0, "evict")}


def test_chunks_of_rows_accumulate_to_the_whole():
    policy, whole = H2O(), golden_prefill()
    state = torch.zeros(1, 1, 8)
    for rows in whole.split(3, dim=1):
        chunk = columns(rows, policy.needs(0, "prefill"), num_kv_heads=1)
        state = policy.observe(0, "prefill", state, chunk, torch.arange(8)[None, None])
    torch.testing.assert_close(state, columns(whole, Need("sum"), num_kv_heads=1))


def test_the_kept_set_does_not_freeze_on_the_first_prompt_tokens():
    # All attention on tokens 0-3 for ever: the newest 8 of 64 generated tokens are still held.
    def attend(positions):
        return torch.softmax(torch.where(positions[0, 0] < 4, 5.0, -5.0), -1).expand(2, -1)

    probabilities = torch.stack([attend(torch.arange(32)[None, None])] * 32, 1).tril()
    row = prefill(H2O(), probabilities, budget=16)
    for token in range(32, 96):
        row.decode(token, attend)
        (kept,) = row.kept()
        assert len(kept) == 16
        assert {*range(4), *range(token - 7, token + 1)} <= set(kept)
