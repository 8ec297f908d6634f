"""pin_slots: many layers at once, against token by token."""

from __future__ import annotations

import copy

import pytest
import torch
from cut_problems import DEVICE, Case, some_requests
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.kernels.pin_slots import pin_slots, pin_slots_reference, pin_slots_triton


@given(
    data=st.data(),
    shared=st.booleans(),
    with_sums=st.booleans(),
    tokens_first=st.booleans(),
    dim=st.sampled_from([16, 24, 64]),
    seed=st.integers(0, 99),
)
def test_moves(data, shared, with_sums, tokens_first, dim, seed) -> None:
    """Chosen slots stand in order in the pinned blocks; nothing else has changed."""
    requests = data.draw(some_requests(3, 16, 1))
    case = Case(requests, dim=dim, pinned=3, tokens_first=tokens_first, seed=seed)
    keep, heads = 3 * 16, 1 if shared else 2
    index = torch.zeros(2, len(requests), heads, keep, dtype=torch.int32)
    for layer in range(2):
        for m in range(len(requests)):
            for head in range(heads):
                chosen = torch.randperm(case.candidates(m), generator=case.gen)[:keep]
                index[layer, m, head] = chosen.sort().values.int()
    for run in (pin_slots, pin_slots_triton, pin_slots_reference):
        check_moves(run, case, index.to(DEVICE), with_sums)


def check_moves(run, case, index, with_sums) -> None:
    """On copies of the case's tensors, which lie elsewhere: distances are of those, too."""
    case = copy.copy(case)
    case.caches, case.sums = ([t.clone() for t in ts] for ts in (case.caches, case.sums))
    before = [[t.clone() for t in tensors] for tensors in (case.caches, case.sums)]
    wanted = [[t.clone() for t in tensors] for tensors in before]
    for layer in range(2):
        for m in range(len(case.requests)):
            where = case.places(layer, m)
            for head in range(2):
                row = index[layer, m, head % index.shape[2]].tolist()
                for (block, offset), slot in zip(where, row, strict=False):
                    b, o = where[slot]
                    for new, old in zip(wanted, before, strict=True):
                        new[layer][block, head, offset] = old[layer][b, head, o]
    run(case.cuts(case.sums), index, with_sums=with_sums)
    for layer in range(2):
        assert torch.equal(case.caches[layer], wanted[0][layer])
        assert torch.equal(case.sums[layer], (wanted if with_sums else before)[1][layer])


def test_what_does_not_fit() -> None:
    case = Case([(150, 2, 5)])
    with pytest.raises(ValueError, match="index of shape"):
        pin_slots(case.cuts(case.sums), torch.zeros(2, 1, 2, 16, dtype=torch.int32))
    index = torch.zeros(2, 1, 2, 32, dtype=torch.int32)
    with pytest.raises(ValueError, match="index of dtype"):
        pin_slots(case.cuts(case.sums), index.long())
    with pytest.raises(ValueError, match="sums of shape"):
        pin_slots(case.cuts(case.rings), index, with_sums=True)
