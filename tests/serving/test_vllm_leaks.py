"""A hundred requests through a pool that is too small, some aborted at any time: nothing is lost,
and who was left alone says what it says in a pool with room for all."""

from __future__ import annotations

import random

import pytest
from engines import generate, needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow]

REQUESTS, ABORTED, SEED = 100, 20, 1
FEWER = 30
SETTINGS = {"policy": "layersplit", "budget": 64, "recent": 32, "window_rows": 8}
ENGINE = {"max_model_len": 192, "max_num_batched_tokens": 96}  # prompts are read in chunks


def test_aborted_and_preempted_at_random() -> None:
    rng = random.Random(SEED)
    lengths = tuple(rng.randint(40, 130) for _ in range(REQUESTS))
    new = [rng.randint(10, 40) for _ in range(REQUESTS)]
    # About every fifth step one ends: an abort finds its request waiting, being read, or decoding.
    abort = {str(i): 5 * i + rng.randint(-60, 40) for i in rng.sample(range(REQUESTS), ABORTED)}
    abort = {request: max(step, 0) for request, step in abort.items()}
    calm = generate(lengths, new, SETTINGS, **ENGINE)
    tight = generate(lengths, new, SETTINGS, abort, kv_cache_memory_bytes=21 << 20, **ENGINE)
    for out in (calm, tight):
        assert out["leaked_blocks"] == 0 and out["left_behind"] == 0
    again = {request for request, times in tight["preempted"].items() if times}
    gone = tight["aborted"]  # tokens that were cached then
    assert len(again) >= 5, again
    assert sum(n == 0 for n in gone.values()) >= 3 and sum(n > 0 for n in gone.values()) >= 3, gone
    assert not any(calm["preempted"].values()) and len(calm["answers"]) == REQUESTS
    assert len(tight["answers"]) == REQUESTS - len(gone)
    # What is read again is attended in full: only the others must be the same.
    alone = sorted(set(tight["answers"]) - again, key=int)
    assert len(alone) >= REQUESTS // 2
    for request in alone:
        assert tight["answers"][request]["tokens"] == calm["answers"][request]["tokens"], request


def test_chunked_prefill() -> None:
    """The same for prompts that are cut while they are read; what is said depends on chunks."""
    rng = random.Random(SEED)
    lengths = tuple(rng.randint(60, 150) for _ in range(FEWER))
    new = [rng.randint(10, 40) for _ in range(FEWER)]
    abort = {str(i): max(5 * i + rng.randint(-60, 40), 0) for i in range(0, FEWER, 5)}
    settings = {**SETTINGS, "prefill": "chunked"}
    out = generate(lengths, new, settings, abort, kv_cache_memory_bytes=14 << 20, **ENGINE)
    assert out["leaked_blocks"] == 0 and out["left_behind"] == 0
    assert sum(out["preempted"].values()) >= 3 and len(out["aborted"]) >= 3, out["preempted"]
    for request in set(map(str, range(FEWER))) - set(out["aborted"]):
        assert len(out["answers"][request]["tokens"]) == new[int(request)]
