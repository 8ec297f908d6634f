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


def test_each_tier_holds_its_own() -> None:
    """4000 tokens are 125 blocks; 117 go but for 7, 4 and 1 of them, and a new one comes."""
    blocks = 3 * 126 + 9 * sum(9 + pinned for pinned in (7, 4, 1))
    block_bytes = 32 * 3 * 64 * 2 * 4
    found = held({"policy": "pyramid", "budget": 384, "recent": 256})
    # The pool's bytes are no whole number of blocks; one block more would be 1.4e-3.
    assert found == pytest.approx(blocks * block_bytes, rel=5e-4)
