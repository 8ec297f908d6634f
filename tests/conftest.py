"""Shared by all tests: Triton interpreter without a GPU, hypothesis profiles, the gpu marker."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("zoo")
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Read when triton (and every @jit function) is first imported, so it must be set here.
    os.environ.setdefault("TRITON_INTERPRET", "1")

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile(
    "ci", max_examples=20, derandomize=True, deadline=None, suppress_health_check=_QUIET
)
settings.register_profile("gpu", parent=settings.get_profile("ci"), max_examples=100)
settings.load_profile("gpu" if HAS_GPU else "ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What only a developer's machine has."""
    parser.addoption(
        "--kvpress-python", help="a Python (or a script that starts one) that has kvpress 0.5.5"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a CUDA device, tests marked gpu are skipped."""
    if not HAS_GPU:
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
