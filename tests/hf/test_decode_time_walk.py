"""Random walks of the decode-time policies, with settings that disagree with their defaults.

The seeds stay clear of what rounding decides: which of two keys KeyDiff keeps in one slot (they are
as far from their mean), and probabilities within 1e-5 of the mean that Scissorhands compares with.
"""

from __future__ import annotations

import random

import pytest
from test_walk import Walk, run

from sparsekv.kernels._quant import KV_FORMATS
from sparsekv.policies import RKV, TOVA, KeyDiff, Keyformer, Policy, Scissorhands


def any_policy(pick: random.Random) -> Policy:
    """One of those that work between decode steps."""
    group = pick.choice(["mean", "max", "sum"])
    kind = pick.choice([TOVA, Scissorhands, Keyformer, KeyDiff, RKV])
    if kind is Scissorhands:
        window, recent = pick.choice([1, 4, 12, 400]), pick.choice([0, 2, 10])
        return Scissorhands(window, recent, pick.choice([0.0, 0.3, 0.5, 1.0]), group)
    if kind is Keyformer:
        noise = pick.choice(["gumbel", "none"])
        return Keyformer(
            pick.choice([0.0, 0.3, 1.0]), tau_steps=pick.choice([3, 128]), seed=pick.choice([0, 9]),
            noise=noise, group=group,
        )  # fmt: skip
    if kind is KeyDiff:
        return KeyDiff(pick.choice([3, 8, 128]))
    if kind is RKV:
        similarity, mix = pick.choice([0.1, 0.5]), pick.choice([0.1, 0.5])
        return RKV(
            pick.choice([1, 4, 8]), pick.choice([1, 3]), similarity, mix, pick.choice([1, 5])
        )
    return TOVA()


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_random_walk(seed, quantised):
    policy = any_policy(random.Random(300 + seed))
    kv_dtype = [*KV_FORMATS][seed % len(KV_FORMATS)] if quantised else None
    walk = Walk(3000 + seed, kv_dtype, fixed=lambda layers, heads: policy)
    run(walk)
