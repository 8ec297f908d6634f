"""Random: reproducible, different for every head and seed."""

from __future__ import annotations

import torch
from harness import golden_prefill, prefill

from sparsekv.policies import Random, Stats
from sparsekv.policies.noise import uniform


def scores(policy, layer, positions):
    lengths = torch.full(positions.shape[:2], positions.shape[-1], dtype=torch.int32)
    recent = torch.zeros(len(positions), dtype=torch.int32)
    return policy.score(layer, Stats(None, None, positions, lengths, recent))


def test_a_score_depends_on_seed_layer_head_and_position_only():
    positions = torch.arange(50, dtype=torch.int32).expand(2, 3, -1)
    got = scores(Random(5), 4, positions)
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[0, 1], uniform(5, 4, 1, torch.arange(50)))
    some = torch.tensor([3, 17, 41], dtype=torch.int32)
    assert torch.equal(scores(Random(5), 4, some.expand(2, 3, -1)), got[..., some.long()])
    for other in (scores(Random(6), 4, positions), scores(Random(5), 3, positions)):
        assert not torch.equal(other, got)


def test_kept_sets_repeat_and_differ_by_head_and_seed():
    first, again, other = (
        prefill(Random(seed), golden_prefill(), 4, num_kv_heads=2).kept() for seed in (0, 0, 1)
    )
    assert first == again != other
    assert [len(head) for head in first] == [4, 4]
    assert first[0] != first[1]
