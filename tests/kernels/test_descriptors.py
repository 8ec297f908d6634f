"""The matrix that a TMA descriptor gets holds every row of every head where the kernels look."""

from __future__ import annotations

import pytest
import torch
from strategies import LAYOUTS, relayout

from sparsekv.kernels._descriptors import matrix_of


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 3, 16), (1, 3, 16), (5, 1, 16), (1, 1, 64), (40, 8, 128)])
def test_rows_are_where_they_should_be(shape: tuple[int, int, int], layout: str) -> None:
    x = relayout(torch.randn(shape).to(torch.bfloat16), layout)
    view = matrix_of(x)
    if view is None:  # a fused slice of narrow heads may start between multiples of 16 bytes
        assert x.data_ptr() % 16
        return
    matrix = x.as_strided(view.shape, view.strides)  # within the storage, or torch refuses
    for t in range(shape[0]):
        for h in range(shape[1]):
            column = h * view.head_col
            row = matrix[t + h * view.head_row, column : column + shape[2]]
            assert torch.equal(row, x[t, h])


def test_what_a_descriptor_cannot_express() -> None:
    x = torch.zeros(40, 2, 64, dtype=torch.float16)
    assert matrix_of(x) is not None
    assert matrix_of(x.float()) is None
    assert matrix_of(x[:0]) is None
    assert matrix_of(torch.zeros(40, 2, 72, dtype=x.dtype)[..., 4:68]) is None  # 8 bytes off
    assert matrix_of(torch.zeros(40, 2, 68, dtype=x.dtype)[..., :64]) is None  # odd head stride
    assert matrix_of(torch.zeros(40, 2, 64, dtype=x.dtype).expand(40, 2, 64)[::3]) is not None
    assert matrix_of(x[:1, :1].expand(40, 2, 64)) is None  # every token the same memory
