"""The counter-based noise: the same bits as integer arithmetic in Python, and noise."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.policies.noise import gumbel, uniform

_MASK = 0xFFFFFFFF


def plain_uniform(*values: int) -> float:
    h = 0
    for value in values:
        h = (h + 0x9E3779B9 * (value + 1)) & _MASK
        h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK
        h = ((h ^ (h >> 15)) * 0x846CA68B) & _MASK
        h ^= h >> 16
    return ((h >> 9) + 0.5) / 2**23


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
def test_the_same_as_in_python(values):
    expected = plain_uniform(*values)
    got = uniform(*values[:-1], torch.tensor(values[-1], dtype=torch.int32))
    assert got.dtype == torch.float32
    assert got.item() == expected  # exact in fp32
    assert 0.0 < got.item() < 1.0
    zeta = gumbel(*values[:-1], torch.tensor(values[-1]))
    assert math.isclose(zeta.item(), -math.log(-math.log(expected)), rel_tol=1e-4, abs_tol=1e-5)


def test_it_broadcasts_and_looks_uniform():
    heads, positions = torch.arange(8)[:, None], torch.arange(4096)
    u = uniform(0, 3, heads, positions)
    assert u.shape == (8, 4096)
    assert u[5, 77].item() == plain_uniform(0, 3, 5, 77)
    assert abs(u.mean().item() - 0.5) < 0.01
    assert abs(u.var().item() - 1 / 12) < 0.005
    neighbours = torch.corrcoef(torch.stack([u[:, 1:].flatten(), u[:, :-1].flatten()]))[0, 1]
    assert abs(neighbours.item()) < 0.03
    assert (uniform(1, 3, heads, positions) != u).float().mean() > 0.99
    assert abs(gumbel(0, 3, heads, positions).mean().item() - 0.5772) < 0.03
