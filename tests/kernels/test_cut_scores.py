"""cut_scores and sum_scores: many layers at once, against token by token in float64."""

from __future__ import annotations

import pytest
import torch
from cut_problems import DEVICE, Case, some_requests
from hypothesis import given
from hypothesis import strategies as st
from strategies import BLOCKS

from sparsekv.kernels.cut_scores import (
    cut_scores,
    cut_scores_reference,
    cut_scores_triton,
    sum_scores,
    sum_scores_reference,
    sum_scores_triton,
)

VOTES = (cut_scores, cut_scores_triton, cut_scores_reference)
SUMS = (sum_scores, sum_scores_triton, sum_scores_reference)


@given(
    data=st.data(),
    rows=st.sampled_from([1, 3, 8, 32]),
    group=st.sampled_from([1, 3, 8]),
    **BLOCKS,
)
def test_votes(
    data, rows, group, kv_heads, dim, size, tokens_first, softcap, reduction, seed
) -> None:
    requests = data.draw(some_requests(2, size, rows))
    case = Case(
        requests, kv_heads=kv_heads, group=group, dim=dim, size=size, rows=rows,
        tokens_first=tokens_first, seed=seed,
    )  # fmt: skip
    how = {"softmax_scale": dim**-0.5, "softcap": softcap, "reduction": reduction}
    founds = [run(case.cuts(case.rings), **how) for run in VOTES]
    for layer in range(len(case.caches)):
        for m in range(len(requests)):
            for head in range(kv_heads):
                wanted = case.expected(layer, m, head, dim**-0.5, softcap, reduction)
                c = case.candidates(m)
                for found in founds:
                    got = found[layer, m, head, :c].double().cpu()
                    torch.testing.assert_close(got, wanted[:c], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("reduction", ["mean", "max", "sum"])
def test_many_rows_in_tiles(reduction) -> None:
    """More rows than a tile has: the heads of a group come one after the other."""
    case = Case([(16 * 6 + 100, 2, 4)], group=3, rows=100, layers=1, kv_heads=1)
    wanted = case.expected(0, 0, 0, 0.25, None, reduction)[:64]
    for run in VOTES:
        found = run(case.cuts(case.rings), softmax_scale=0.25, reduction=reduction)[0, 0, 0, :64]
        torch.testing.assert_close(found.double().cpu(), wanted, rtol=2e-5, atol=2e-6)


def test_sums_of_candidates() -> None:
    case = Case([(150, 2, 5), (300, 4, 5)])
    founds = [run(case.cuts(case.sums)) for run in SUMS]
    for layer in range(2):
        for m in range(2):
            where = case.places(layer, m)[: case.candidates(m)]
            blocks, offsets = torch.tensor(where).T
            wanted = case.sums[layer][blocks, :, offsets].T
            for found in founds:
                assert torch.equal(found[layer, m, :, : len(where)], wanted)


def test_what_does_not_fit() -> None:
    case = Case([(150, 2, 5)])
    with pytest.raises(ValueError, match="caches of one layout"):
        case.caches[1] = case.caches[1].contiguous()
        case.cuts(case.rings)
    case = Case([(150, 2, 5)])
    with pytest.raises(ValueError, match="2 others, got 1"):
        case.cuts(case.rings[:1])
    with pytest.raises(ValueError, match="16 bytes apart"):
        flat = torch.zeros(2, 2 * case.sums[0].numel(), device=DEVICE)
        ends = [flat[0], flat[1, 1:]]
        case.sums = [end[: case.sums[0].numel()].view(case.sums[0].shape) for end in ends]
        case.cuts(case.sums)
    case = Case([(40 * 16, 2, 5)], rows=129)
    with pytest.raises(ValueError, match="at most 128 voting queries"):
        cut_scores(case.cuts(case.rings), softmax_scale=1.0)
    with pytest.raises(ValueError, match="reduction"):
        small = Case([(150, 2, 5)])
        cut_scores(small.cuts(small.rings), softmax_scale=1.0, reduction="median")
