"""Fixtures of the Hugging Face tests. One thread: it is the faster choice for tiny models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from rig import tiny_llama
from transformers import LlamaForCausalLM


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model() -> LlamaForCausalLM:
    """A fresh tiny Llama, not patched."""
    return tiny_llama()
