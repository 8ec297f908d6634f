"""The tiny models of tests/hf serve here, too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "hf"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The faster choice for tiny models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
