"""vLLM on a GPU: the plugin's FlashAttention backend, with and without CUDA graphs, says what the
independent evictor says in fp32, as far as bf16 can."""

from __future__ import annotations

import pytest
import torch
from engines import generate, needs_vllm
from test_vllm_exact import CASES, LENGTHS, NEW, expected

CLOSE = 0.1  # between log-probabilities of the same token in bf16 and fp32
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


def apart(one: tuple, other: tuple) -> int | None:
    """The first token that differs; at it, and before, log-probabilities must be close: a token
    that is as likely as another may be told apart by rounding."""
    for i, (a, b, p, q) in enumerate(zip(one[0], other[0], one[1], other[1], strict=True)):
        assert abs(p - q) < CLOSE, f"token {i}: {p} and {q}"
        if a != b:
            return i
    return None


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("policy", CASES)
def test_says_what_the_evictor_says(policy: str, eager: bool) -> None:
    got = said(policy, eager)
    assert got["leaked_blocks"] == 0 and got["left_behind"] == 0
    for row in range(len(LENGTHS)):
        answer = got["answers"][str(row)]
        at = apart((answer["tokens"], answer["logprobs"]), expected(policy, row))
        print(f"{policy}, eager {eager}, row {row}: first other token {at} of {NEW}")


@pytest.mark.parametrize("policy", CASES)
def test_twice_the_same(policy: str) -> None:
    """Two engines with graphs: the same tokens, the same log-probabilities."""
    once = said(policy, False)["answers"]
    settings = {"policy": policy, **CASES[policy][0]}
    again = generate(LENGTHS, NEW, settings, {"none": -1}, **SETTINGS, enforce_eager=False)
    assert again["answers"] == once
