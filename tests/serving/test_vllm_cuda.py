"""vLLM on a GPU: the plugin's FlashAttention backend, with and without CUDA graphs, says what the
independent evictor says in fp32, as far as bf16 can."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from block_evictor import BlockEvictor, greedy
from engines import BLOCK, generate, needs_vllm, run
from test_vllm_exact import CASES, LENGTHS, NEW, RANKS, expected
from tiny import save_tiny_model

# Between log-probabilities of the same token in bf16 and fp32: of any, and on average.
CLOSE, MEAN = 0.5, 0.06
# Other processes may hold most of the card: vLLM wants this share free before it starts.
SETTINGS = {
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 1 << 30,
    "gpu_memory_utilization": 0.04,
}

pytestmark = [
    needs_vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def said(policy: str, eager: bool) -> dict:
    settings = {"policy": policy, **CASES[policy][0]}
    return generate(LENGTHS, NEW, settings, **SETTINGS, enforce_eager=eager)


def apart(one: tuple, other: tuple) -> tuple[int | None, float, float]:
    """The first token that differs, and how far apart log-probabilities are until then, at most and
    on average: a token that is as likely as another may be told apart by rounding."""
    same = [a == b for a, b in zip(one[0], other[0], strict=True)]
    first = None if all(same) else same.index(False)
    gaps = [abs(p - q) for p, q in zip(one[1][:first], other[1][:first], strict=True)]
    return first, max(gaps, default=0.0), sum(gaps) / max(len(gaps), 1)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("policy", CASES)
def test_says_what_the_evictor_says(policy: str, eager: bool) -> None:
    got = said(policy, eager)
    assert got["leaked_blocks"] == 0 and got["left_behind"] == 0
    for row in range(len(LENGTHS)):
        answer = got["answers"][str(row)]
        first, most, mean = apart((answer["tokens"], answer["logprobs"]), expected(policy, row))
        print(f"{policy}, eager {eager}, row {row}: {first} of {NEW}, {most:.3f}, mean {mean:.3f}")
        assert most < CLOSE and mean < MEAN


@pytest.mark.parametrize("policy", CASES)
def test_twice_the_same(policy: str) -> None:
    """Two engines with graphs: the same tokens, the same log-probabilities."""
    once = said(policy, False)["answers"]
    settings = {"policy": policy, **CASES[policy][0]}
    again = generate(LENGTHS, NEW, settings, {"none": -1}, **SETTINGS, enforce_eager=False)
    assert again["answers"] == once


# SmolLM2 has 9 query heads, which two ranks cannot share.
EVEN = {
    "num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 512, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096,
    "initializer_range": 0.06,
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("policy", ["layersplit", "h2o"])
def test_two_ranks(policy: str, tmp_path: Path) -> None:
    """Four query heads and two KV heads a rank, which cuts its own; all blocks are given back."""
    folder = str(save_tiny_model(tmp_path, **EVEN))
    asked = [random.Random(n).choices(range(250), k=n) for n in RANKS]
    settings = {"policy": policy, **CASES[policy][0]}
    got = run(folder, asked, NEW, settings, **SETTINGS, enforce_eager=False, tensor_parallel_size=2)
    assert got["leaked_blocks"] == 0 and got["left_behind"] == 0
    for row, prompt in enumerate(asked):
        wanted = greedy(folder, prompt, NEW, BlockEvictor(3, BLOCK, 128, 256, **CASES[policy][1]))
        answer = got["answers"][str(row)]
        first, most, mean = apart((answer["tokens"], answer["logprobs"]), wanted)
        print(f"{policy}, two ranks, row {row}: {first} of {NEW}, {most:.3f}, mean {mean:.3f}")
        assert most < CLOSE and mean < MEAN
