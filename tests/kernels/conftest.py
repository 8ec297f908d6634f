"""Kernel tests run under two sabotages: torch.empty gives NaN, programs run in random order."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def poisoned_empty() -> Iterator[None]:
    """torch.empty and empty_like return NaN (integers: a huge value): reading it must show."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like"):
            patch.setattr(torch, name, _poisoned(getattr(torch, name)))
        yield


def _poisoned(allocate):
    def wrapper(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.dtype.is_floating_point:
            return tensor.fill_(torch.nan)
        return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)

    return wrapper


@pytest.fixture(autouse=True, scope="module")
def shuffled_programs() -> Iterator[None]:
    """The interpreter runs the programs of a grid in a random order, as a GPU may."""
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime.interpreter import interpreter_builder as builder

    set_idx, rng, orders = builder.set_grid_idx, random.Random(0), {}

    def shuffled(x: int, y: int, z: int) -> None:
        nx, ny, nz = builder.grid_dim
        if x == y == z == 0:  # a new launch draws a new order
            orders[0] = rng.sample(range(nx * ny * nz), nx * ny * nz)
        program = orders[0][(x * ny + y) * nz + z]
        set_idx(program // (ny * nz), program // nz % ny, program % nz)

    builder.set_grid_idx = shuffled
    yield
    del builder.set_grid_idx
