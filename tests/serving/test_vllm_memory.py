"""KV held, counted in vLLM's own block pool."""

from __future__ import annotations

import pytest
from engines import generate, needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow]

SETTINGS = {"policy": "streaming", "budget": 384, "sinks": 128}


def held(settings: dict) -> float:
    """Bytes in use at the end of a request of 4000 prompt tokens, before it is freed."""
    long = {"max_model_len": 4100, "max_num_seqs": 1, "kv_cache_memory_bytes": 1 << 29}
    out = generate((4000,), 4, settings, **long)
    assert out["leaked_blocks"] == 0
    return out["used_bytes"][-2]


def test_five_times_less_than_dense() -> None:
    dense = held({"policy": "full", "budget": 1})
    sparse = held(SETTINGS)
    assert dense / sparse >= 5, (dense / 2**20, sparse / 2**20)
