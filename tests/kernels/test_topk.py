"""select_topk: the reference against a naive sort, then the Triton kernel against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from sparsekv.kernels.topk import select_topk, select_topk_reference


def naive(scores, lens, k, protected=None):
    """Plain Python: sort (protected, score, slot) tuples."""
    out = []
    for r, row in enumerate(scores.tolist()):
        n, quota = int(lens[r]), int(k if isinstance(k, int) else k[r])
        x = [-math.inf if math.isnan(v) else v for v in row]
        p = protected[r].tolist() if protected is not None else [False] * len(x)
        order = sorted(range(n), key=lambda i: (p[i], 0 if p[i] else x[i], i), reverse=True)
        out.append(sorted(order[:quota]))
    return out


def unpack(index, count):
    assert index.dtype == count.dtype == torch.int32
    assert all((row[c:] == -1).all() for row, c in zip(index, count.tolist(), strict=True))
    return [row[:c].tolist() for row, c in zip(index, count.tolist(), strict=True)]


def test_smoke():
    torch.manual_seed(0)
    s = torch.randint(0, 4, (5, 37)).float()
    s[0, :5] = torch.nan
    s[1, 3] = torch.inf
    lens = torch.tensor([37, 20, 0, 1, 30], dtype=torch.int32)
    k = torch.tensor([10, 40, 3, 0, 7], dtype=torch.int32)
    prot = torch.rand(5, 37) < 0.3
    for p in (None, prot):
        assert unpack(*select_topk(s, lens, k, protected=p)) == naive(s, lens, k, p)
        assert unpack(*select_topk_reference(s, lens, 9, protected=p)) == naive(s, lens, 9, p)
    index, count = select_topk(s, lens, 50)
    assert index.shape == (5, 50) and count.tolist() == lens.tolist()
    with pytest.raises(ValueError, match="expected k >= 0, got -1"):
        select_topk(s, lens, -1)


def test_triton():
    from sparsekv.kernels.topk import select_topk_triton

    torch.manual_seed(0)
    s = torch.randint(-2, 4, (5, 700)).float()
    s[0, :5] = torch.nan
    s[1, 3] = torch.inf
    lens = torch.tensor([700, 20, 0, 1, 300], dtype=torch.int32)
    k = torch.tensor([10, 40, 3, 0, 7], dtype=torch.int32)
    prot = torch.rand(5, 700) < 0.3
    for p in (None, prot):
        for kk in (k, 90):
            for m in (None, 20, 800):
                a = select_topk_triton(s, lens, kk, protected=p, max_k=m)
                b = select_topk_reference(s, lens, kk, protected=p, max_k=m)
                assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
