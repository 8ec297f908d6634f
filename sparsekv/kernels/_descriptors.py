"""Packed tensors as the tensor memory accelerator (TMA) sees them: rows of a 2-D matrix.

A descriptor covers all packed tokens, not one sequence: a tile at the end of a sequence also brings
rows of whatever comes next (zeros beyond the tensor), which a kernel must hide.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_ALIGN = 16  # bytes, of the base and of every stride but the last
_MAX_ROWS = 1 << 30  # coordinates are 32-bit


class Matrix(NamedTuple):
    """x [T, H, D] as a matrix: token t of head h starts at row t + h * head_row, column
    h * head_col."""

    shape: list[int]
    strides: list[int]
    head_row: int
    head_col: int


def matrix_of(x: Tensor) -> Matrix | None:
    """The matrix behind 16-bit x [T, H, D] with stride(-1) == 1; None: no descriptor has it.

    Heads may lie side by side inside a token (also of a wider, fused row) or whole rows apart.
    """
    tokens, heads, head_dim = x.shape
    token, head = x.stride(0), x.stride(1) if heads > 1 else head_dim
    if tokens <= 1:  # its stride means nothing
        token = max(heads * head, head_dim)
    unit = _ALIGN // 2
    fits = x.dtype in (torch.float16, torch.bfloat16) and tokens > 0
    if not fits or x.data_ptr() % _ALIGN or token % unit or head % unit or head <= 0:
        return None
    if (heads - 1) * head + head_dim <= token:
        return Matrix([tokens, (heads - 1) * head + head_dim], [token, 1], 0, head)
    rows = head // token if token > 0 else 0
    if token < head_dim or head % token or rows * heads >= _MAX_ROWS:
        return None
    return Matrix([(heads - 1) * rows + tokens, head_dim], [token, 1], rows, 0)
