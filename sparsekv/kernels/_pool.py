"""Checks of a page pool, shared by append and compact."""

from __future__ import annotations

import torch
from torch import Tensor

from ._common import check_dtype, check_last_contiguous, check_shape


def check_pool(
    k_pages: Tensor, v_pages: Tensor, positions: Tensor, scores: Tensor, head_dim: int | None = None
) -> None:
    """Raise ValueError unless k_pages, v_pages [N,P,D], positions int32, scores fp32 [N,P] fit."""
    check_shape("k_pages", k_pages, (None, None, head_dim))
    check_shape("v_pages", v_pages, k_pages.shape)
    check_shape("positions", positions, k_pages.shape[:2])
    check_shape("scores", scores, k_pages.shape[:2])
    check_dtype("positions", positions, torch.int32)
    check_dtype("scores", scores, torch.float32)
    check_last_contiguous("k_pages", k_pages)
    check_last_contiguous("v_pages", v_pages)
    for name, x in (("positions", positions), ("scores", scores)):
        if not x.is_contiguous():  # written in place: a copy would be lost
            raise ValueError(f"expected contiguous {name}, got strides {x.stride()}")
