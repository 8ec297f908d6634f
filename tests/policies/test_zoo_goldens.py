"""The library's policies on the worked example: what they plan, score and select, no model.

Statistics and features come from the reference, which `tests/test_goldens.py` proves, so that a
policy is tested here on its own arithmetic alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from golden_problem import PROMPT, QUERIES, ROWS, SCALE, VALUES
from harness import prefill
from reference import expected, keys, rkv, values

from sparsekv.policies import POLICIES

SNAP = POLICIES["snapkv"](window=2, pool="none")


def table(feature, kv_heads=1):
    """The features of the contract, by name, for one KV head of two queries: fp32 [1, HK, 8]."""
    name = type(feature).__name__
    if name == "KeyNorm":
        row = keys.norms(PROMPT)
    elif name == "KeyAnchor":
        row = keys.anchor_cosines(PROMPT)
    elif name == "ValueNorm":
        row = values.norms(VALUES[:8])
    elif name == "ProjectedValueNorm":
        w_o = torch.cat([torch.eye(4, dtype=torch.float64)] * 2, 1)
        row = values.projected_norms(VALUES[None, :8], w_o, 2)[0]
    elif name == "ExpectedProbability":
        queries = QUERIES[:, feature.sinks : 8]
        row = expected.probability(PROMPT, queries, feature.sinks, SCALE, None, feature.covariance)
    elif name == "GroupMaxWindow":
        votes = rkv.importance(QUERIES[:, 8 - feature.rows : 8], PROMPT, feature.rows, SCALE)
        row = torch.cat([votes, votes.new_zeros(feature.rows)])
    else:
        assert name == "KeySimilarity", name
        row = keys.redundancy(PROMPT, feature.threshold)
    return row.float().expand(1, kv_heads, -1)


def held(name, budget, kv_heads=1, **fields):
    """Kept positions by KV head; skips what the library does not have."""
    if name not in POLICIES:
        pytest.skip(f"sparsekv.POLICIES has no {name!r} yet")
    policy = POLICIES[name](**fields)
    row = prefill(
        policy, ROWS, budget, num_kv_heads=kv_heads,
        features=lambda feature: table(feature, kv_heads),
    )  # fmt: skip
    return row.kept()


def test_tova():
    assert held("tova", 4) == [[2, 4, 5, 7]]
    assert held("tova", 4, kv_heads=2) == [[2, 4, 5, 7]] * 2


def test_scissorhands():
    """One at a time, so that the budget is met; ties drop the oldest."""
    fields = {"window": 3, "recent": 2, "drop": 0.25}
    assert held("scissorhands", 4, kv_heads=2, **fields) == [[1, 4, 6, 7], [4, 5, 6, 7]]
    assert [len(head) for head in held("scissorhands", 6, drop=0.5, recent=2)] == [5]


def test_keyformer_without_noise_is_h2o():
    assert held("keyformer", 4, recent_fraction=0.5, noise="none") == [[0, 1, 6, 7]]


def test_adakv():
    """Base 2 and a window of 2: shares 1.2 and 2.8."""
    fields = {"scorer": SNAP}
    assert held("adakv", 4, kv_heads=2, **fields) == [[2, 6, 7], [2, 3, 5, 6, 7]]
    assert held("adakv", 4, kv_heads=2, floor=1.0, **fields) == [[1, 2, 6, 7], [2, 5, 6, 7]]
    safe = held("adakv", 4, kv_heads=2, mode="safeguard", floor=0.5, **fields)
    assert safe == [[2, 6, 7], [2, 3, 5, 6, 7]]


def test_criticalkv():
    assert held("criticalkv", 4, scorer=SNAP) == [[2, 3, 6, 7]]
    assert held("criticalkv", 4, scorer=SNAP, first_share=1.0) == [[2, 5, 6, 7]]


def test_chunked():
    """Chunk means .1499 .3233 .2346: tokens 2 and 3, then the newest of 4 and 5."""
    assert held("chunked", 4, scorer=SNAP, chunk=2) == [[2, 3, 6, 7]]
    assert held("chunked", 5, scorer=SNAP, chunk=2) == [[2, 3, 5, 6, 7]]
    assert held("chunked", 5, scorer=SNAP, chunk=3) == [[3, 4, 5, 6, 7]]


def test_expected():
    assert held("expected", 4, sinks=1) == [[0, 1, 2, 5]]


def test_keydiff():
    assert held("keydiff", 4) == [[3, 4, 5, 7]]


def test_rkv():
    for mix in (0.07, 0.1):
        fields = {"window": 2, "kernel": 3, "mix": mix}
        assert held("rkv", 4, **fields) == [[3, 4, 6, 7]]


def test_knorm():
    """Norms 5 16 6 6 9 9 6 9, squared."""
    assert held("knorm", 4) == [[0, 2, 3, 6]]
    assert held("knorm", 3) == [[0, 3, 6]]  # of equal norms the newer


def test_wrappers_over_each_other():
    if not {"adakv", "criticalkv"} <= set(POLICIES):
        pytest.skip("sparsekv.POLICIES has not both wrappers yet")
    ada = POLICIES["adakv"](scorer=SNAP)
    both = POLICIES["criticalkv"](scorer=ada, first_share=1.0)
    row = prefill(both, ROWS, 4, num_kv_heads=2, features=lambda feature: table(feature, 2))
    assert row.kept() == [[2, 6, 7], [2, 3, 5, 6, 7]]
    assert replace(both) == both
