"""vLLM with the plugin says, token for token, what an independent evictor says: fp32, a batch of
five with prompts that are read in chunks, 96 greedy tokens, also over three ranks."""

from __future__ import annotations

import functools

import pytest
from block_evictor import BlockEvictor, greedy
from engines import BLOCK, check_same, generate, model, needs_vllm, prompts

pytestmark = [needs_vllm, pytest.mark.slow]

LENGTHS = (700, 90, 1100, 450, 384)  # chunked, within budget, chunked, ragged, just the budget
NEW = 96
RANKS = (700, 90, 450)  # over three ranks, which take turns on a small machine
# settings, and the evictor's reading of them; 128 pinned and 256 recent tokens each. In a pyramid
# nine layers pin 7 blocks, nine 4, nine 1: a ramp from 250 tokens to 6 has 209, 128 and 47 in them.
TIERS = {**dict.fromkeys(range(3, 12), 224), **dict.fromkeys(range(21, 30), 32)}
CASES = {
    "streaming": ({"sinks": 128, "budget": 384}, {}),
    "snapkv": ({"budget": 384, "recent": 256}, {"rows": 32, "kernel": 7, "grows": True}),
    "pyramid": (
        {"budget": 384, "recent": 256},
        {"rows": 8, "kernel": 7, "grows": True, "by_layer": TIERS},
    ),
    "layersplit": ({"budget": 384, "recent": 256}, {"rows": 32}),
    "h2o": ({"budget": 384, "recent": 256}, {"all_rows": True}),
    "tova": ({"budget": 384, "recent": 256}, {"rows": 1, "one_set": True}),
}


@functools.cache
def expected(policy: str, row: int, lengths: tuple[int, ...] = LENGTHS):
    reading = None if policy == "full" else BlockEvictor(3, BLOCK, 128, 256, **CASES[policy][1])
    return greedy(model(), prompts(lengths)[row], NEW, reading)


def check(policy: str, lengths: tuple[int, ...] = LENGTHS, **kwargs) -> None:
    got = generate(lengths, NEW, {"policy": policy, **CASES[policy][0]}, **kwargs)
    assert got["leaked_blocks"] == 0 and got["left_behind"] == 0
    for row in range(len(lengths)):
        tokens, logprobs = expected(policy, row, lengths)
        check_same(got["answers"][str(row)], tokens, logprobs, row)


@pytest.mark.parametrize("policy", CASES)
def test_tokens_and_logprobs(policy: str) -> None:
    check(policy)


@pytest.mark.parametrize("policy", CASES)
def test_the_test_can_fail(policy: str) -> None:
    """Dense attention, and each policy's, say something else on at least one of the prompts."""
    others = [name for name in ("full", *CASES) if name != policy]
    for other in others:
        rows = range(len(LENGTHS))
        assert any(expected(policy, r)[0] != expected(other, r)[0] for r in rows), other


def test_sums_start_anew() -> None:
    """One request after the other in the same few blocks: none sees another's sums."""
    pool = {"max_model_len": 832, "max_num_seqs": 1, "kv_cache_memory_bytes": 42 << 20}
    check("h2o", (700, 450, 512), **pool)


@pytest.mark.parametrize("policy", ["layersplit"])
def test_three_ranks(policy: str) -> None:
    """Nine query heads and three KV heads over three processes: one KV head each."""
    check(policy, RANKS, tensor_parallel_size=3)
