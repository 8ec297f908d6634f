"""Requests with a LoRA adapter are cut as the model with merged weights would have it.

One adapter for all requests: beside requests without one, vLLM's CPU build (0.32) gives these the
adapter, too, sparse or not.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from block_evictor import BlockEvictor, greedy
from engines import BLOCK, check_same, model, needs_vllm, prompts, run
from safetensors.torch import load_file, save_file

pytestmark = [needs_vllm, pytest.mark.slow]

LENGTHS, NEW, RANK = (700, 450), 64, 8
MODULES = ("q_proj", "v_proj")


def adapter_and_merged(folder: Path) -> tuple[Path, Path]:
    """A random adapter in PEFT's layout, and the model with it added to its weights."""
    adapter, merged = folder / "adapter", folder / "merged"
    adapter.mkdir()
    shutil.copytree(model(), merged)
    draw = torch.Generator().manual_seed(0)
    (file,) = merged.glob("*.safetensors")
    weights, parts = {k: v.float() for k, v in load_file(file).items()}, {}
    for name in [n for n in weights if n.split(".")[-2] in MODULES]:
        out, into = weights[name].shape
        a = torch.randn(RANK, into, generator=draw) / into**0.5
        b = torch.randn(out, RANK, generator=draw) * weights[name].std()
        weights[name] = weights[name] + b @ a
        base = f"base_model.model.{name.removesuffix('.weight')}"
        parts |= {f"{base}.lora_A.weight": a, f"{base}.lora_B.weight": b}
    save_file(weights, file, metadata={"format": "pt"})
    save_file(parts, adapter / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(MODULES)}
    about |= {"bias": "none", "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    return adapter, merged


def test_an_adapter(tmp_path: Path) -> None:
    adapter, merged = adapter_and_merged(tmp_path)
    settings = {"policy": "layersplit", "budget": 384, "recent": 256}
    got = run(
        model(), prompts(LENGTHS), NEW, settings, adapter=str(adapter), enable_lora=True,
        max_lora_rank=RANK,
    )  # fmt: skip
    assert got["leaked_blocks"] == 0
    for row, prompt in enumerate(prompts(LENGTHS)):
        evictor = BlockEvictor(3, BLOCK, 128, 256, rows=32)
        tokens, logprobs = greedy(str(merged), prompt, NEW, evictor)
        check_same(got["answers"][str(row)], tokens, logprobs, row)
    plain, _ = greedy(model(), prompts(LENGTHS)[0], NEW, BlockEvictor(3, BLOCK, 128, 256, rows=32))
    assert got["answers"]["0"]["tokens"] != plain
