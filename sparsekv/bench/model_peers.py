"""Peers of the whole model: transformers as it comes, kvpress and vLLM in their own processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sparsekv.bench import workers
from sparsekv.bench.case import Context, Missing
from sparsekv.bench.llama import llama_config

_WORKER_SECONDS = 900
_WORKERS = Path(workers.__file__).parent
# FlashInfer's sampler would be compiled first; a random model has no page on the hub.
_VLLM_FLAGS = ("VLLM_USE_FLASHINFER_SAMPLER=0", "HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1")


def vllm_figures(context: Context) -> dict[str, float]:
    """{"1 4000": ms a token, ..., "ttft 4000": ms} of vLLM, dense; one process a run."""
    context.need_gpu("vLLM")
    if context.vllm_site is None and find_spec("vllm") is None:
        raise Missing("vLLM is not installed; give its packages with --vllm-site")
    path = [] if context.vllm_site is None else [f"PYTHONPATH={context.vllm_site}"]
    command = ["env", *_VLLM_FLAGS, *path, sys.executable]
    return context.once("vllm", lambda: _work(context, [*command, str(_WORKERS / "vllm_dense.py")]))


def kvpress_figures(context: Context) -> dict[str, float]:
    """{"ttft 4000": ms, ...} of kvpress's SnapKV, 10 % kept; one process a run."""
    context.need_gpu("kvpress")
    if context.kvpress_python is None:
        raise Missing("kvpress needs its own transformers (< 5.3); give --kvpress-python")
    command = [context.kvpress_python, str(_WORKERS / "kvpress_snapkv.py")]
    return context.once("kvpress", lambda: _work(context, command))


def figure(figures: Callable[[Context], dict[str, float]], key: str) -> Callable[..., Any]:
    """A factory of one figure that another process measured; measured once, not in rounds."""

    def factory(inputs: Any, context: Context) -> Callable[[], float]:
        value = figures(context)
        if key not in value:
            raise Missing(f"its process did not measure {key!r}")
        return lambda: value[key]

    return factory


def _work(context: Context, command: list[str]) -> dict[str, float]:
    """Run a worker on the model's config; its last line is the JSON of its figures."""
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        llama_config(context.tiny).save_pretrained(folder)
        done = subprocess.run(
            [*command, folder], capture_output=True, text=True, timeout=_WORKER_SECONDS
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"{Path(command[-1]).name} ended with {done.returncode}: {last}")
    return json.loads(lines[-1])
