"""Prompts that are cut while they are read: the same answers as an independent evictor that is
told where vLLM's chunks end, less memory while a prompt is read, and more requests at a time."""

from __future__ import annotations

import pytest
from block_evictor import BlockEvictor, greedy
from engines import BLOCK, check_same, generate, model, needs_vllm, prompts

pytestmark = [needs_vllm, pytest.mark.slow]

LENGTHS, NEW, CHUNK = (300, 90, 420), 40, 64
PINNED, RECENT = 64, 96
# settings, and the evictor's reading of them; a pyramid of three tiers pins 3, 2 and 1 blocks
TIERS = {**dict.fromkeys(range(3, 12), 3 * BLOCK), **dict.fromkeys(range(21, 30), BLOCK)}
CASES = {
    "streaming": ({"sinks": PINNED}, {}),
    "snapkv": ({"recent": RECENT}, {"rows": 32, "kernel": 7, "grows": True}),
    "layersplit": ({"recent": RECENT}, {"rows": 32}),
    "h2o": ({"recent": RECENT}, {"all_rows": True}),
    "tova": ({"recent": RECENT}, {"rows": 1, "one_set": True}),
    "pyramid": (
        {"recent": RECENT},
        {"rows": 8, "kernel": 7, "grows": True, "by_layer": TIERS},
    ),
}
LAYERS = 3  # in a group of vLLM's, of which one keeps everything and nine do not
BLOCK_BYTES = LAYERS * BLOCK * 2 * 3 * 64 * 4  # keys and values of 3 KV heads in fp32


def served(
    policy: str,
    lengths: tuple[int, ...],
    new: int,
    chunk: int = CHUNK,
    prefill: str = "chunked",
    **kwargs,
) -> dict:
    settings = {"policy": policy, "budget": PINNED + RECENT, "prefill": prefill, **CASES[policy][0]}
    return generate(lengths, new, settings, max_num_batched_tokens=chunk, **kwargs)


def read(policy: str, row: int, chunks: list[int] | None):
    evictor = BlockEvictor(3, BLOCK, PINNED, RECENT, **CASES[policy][1])
    return greedy(model(), prompts(LENGTHS)[row], NEW, evictor, chunks)


@pytest.mark.parametrize("policy", CASES)
def test_tokens_and_logprobs(policy: str) -> None:
    got = served(policy, LENGTHS, NEW)
    assert got["leaked_blocks"] == 0 and got["left_behind"] == 0
    for row, length in enumerate(LENGTHS):
        steps = got["chunks"][str(row)]
        chunks = steps[: len(steps) - (NEW - 1)]
        assert sum(chunks) == length and len(chunks) > 1
        tokens, logprobs = read(policy, row, chunks)
        check_same(got["answers"][str(row)], tokens, logprobs, row)


@pytest.mark.parametrize("policy", CASES)
def test_the_test_can_fail(policy: str) -> None:
    """A prompt is answered otherwise if read in other chunks, or attended in full."""
    row = LENGTHS.index(420)
    ways = [None, [64] * 6 + [36], [100] * 4 + [20]]
    said = [read(policy, row, chunks)[1] for chunks in ways]
    for i, one in enumerate(said):
        for other in said[:i]:
            assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-2


def test_memory_while_a_prompt_is_read() -> None:
    """The budget and two chunks in sparse layers, whatever the prompt's length."""
    length, chunk = 1200, 128
    out = served("layersplit", (length,), 2, chunk, max_model_len=1216, max_num_seqs=1)
    assert out["leaked_blocks"] == 0
    peak = max(out["used_bytes"]) / BLOCK_BYTES
    full, most = -(-length // BLOCK), PINNED // BLOCK + -(-(RECENT + 2 * chunk) // BLOCK) + 1
    assert peak <= full + 9 * most < 0.5 * 10 * full, (peak, full, most)
    assert peak > full + 9 * (PINNED + RECENT) // BLOCK  # a chunk was there, too


def test_more_requests_at_a_time() -> None:
    """In a pool with room for one prompt that is read in full."""
    lengths, chunk = (500, 510, 490, 505), 64
    engine = {"kv_cache_memory_bytes": 210 * BLOCK_BYTES, "max_model_len": 544}
    dense = served("streaming", lengths, 16, chunk, prefill="dense", **engine)
    cut = served("streaming", lengths, 16, chunk, **engine)
    assert max(dense["running"]) == 1 and max(cut["running"]) >= 2
    for out in (dense, cut):
        assert out["leaked_blocks"] == 0 and len(out["answers"]) == len(lengths)
        assert not any(out["preempted"].values())


def test_what_admits_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    from sparsekv.vllm.settings import Settings
    from sparsekv.vllm.spec import PinnedWindowManager, PinnedWindowSpec

    caps = []
    monkeypatch.setattr(
        SingleTypeKVCacheManager,
        "__init__",
        lambda self, *args, max_admission_blocks_per_request: caps.append(
            max_admission_blocks_per_request
        ),
    )
    window = SlidingWindowSpec(
        block_size=32, num_kv_heads=3, head_size=64, dtype=None, sliding_window=256
    )
    settings = {"budget": 384, "recent": 256}
    cases = [("layersplit", 0, 128), ("layersplit", 256, 29), ("snapkv", 256, 128)]
    for policy, chunk, blocks in cases:
        prefill = "chunked" if chunk else "dense"
        spec = PinnedWindowSpec.of(
            window, Settings(policy, prefill=prefill, **settings), 32, 0, chunk
        )
        assert spec.max_admission_blocks_per_request(512, 4096) == blocks
        assert spec.max_admission_blocks_per_request(512, 320) == 10  # a model of short texts
        PinnedWindowManager(spec, max_admission_blocks_per_request=blocks)
    assert caps == [128, 29, 29]  # snapkv's prompt needs no more, only what it says does
