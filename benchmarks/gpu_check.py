"""What an issue that touches kernels, cache or decode owes: one run on a CUDA machine.

    python benchmarks/gpu_check.py tests     OUT   # pytest -m gpu
    python benchmarks/gpu_check.py sanitizer OUT   # compute-sanitizer memcheck on small shapes
    python benchmarks/gpu_check.py precision OUT   # graph and compiled against fp32, 8B shape

Each part writes OUT/<part>.log. Timings are the work of `sparsekv bench`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import sparsekv
from sparsekv.bench.policy_settings import setting
from sparsekv.kernels._quant import KV_FORMATS
from sparsekv.policies import (
    RKV,
    KeyDiff,
    LayerSplit,
    ModelShape,
    Planned,
    Policy,
    PyramidInfer,
    Quest,
    SnapKV,
)

SMALL_PROMPT, SMALL_NEW, SMALL_BUDGET = 70, 6, 24
SMALL_SHAPE = ModelShape(num_layers=2, num_heads=8, num_kv_heads=2, head_dim=128)
# Policies whose defaults would do nothing in so few layers and steps.
SMALL: dict[str, Policy] = {
    "keydiff": KeyDiff(block=4),
    "rkv": RKV(window=4, kernel=3, buffer=4),
    "layersplit": LayerSplit(full_layers=1),
    "quest": Quest(dense_layers=1),
    "planned": Planned(SnapKV(window=8), shares=((3, 1), (1, 2))),
    "pyramidinfer": PyramidInfer(decay=0.5, min_context=4, recent=0.03, exceed=2),
}
DEEPER = 4  # layers where the first two see all of a prompt
LONG_PROMPT, LONG_NEW, LONG_BUDGET = 600, 12, 300
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Run the named part."""
    part, out = sys.argv[1], Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    parts = {"tests": tests, "sanitizer": sanitizer, "small": small, "precision": precision}
    parts[part](out)


def tests(out: Path) -> None:
    """The GPU tests of the suite; -v, so that a run cut short tells what it had seen."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider"]
    _logged([*command, "-n", "15", "tests"], out / "tests.log")


def sanitizer(out: Path) -> None:
    """Every kernel through every policy on small shapes, under memcheck."""
    script = [sys.executable, __file__, "small", str(out)]
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    _logged([*command, *script], out / "sanitizer.log")


def small(out: Path, device: str = "cuda") -> None:
    """The workload of `sanitizer`; head_dim 128, so that prompts take the kernel of Hopper."""
    size = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128, "vocab_size": 512}
    heads = {"num_attention_heads": SMALL_SHAPE.num_heads}
    heads |= {"num_key_value_heads": SMALL_SHAPE.num_kv_heads}
    depths = {depth: {"num_hidden_layers": depth} for depth in (SMALL_SHAPE.num_layers, DEEPER)}
    models = {depth: _llama(size | heads | layers, device) for depth, layers in depths.items()}
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.randint(2, 500, (2, SMALL_PROMPT), device=device, generator=generator)
    padded = torch.ones_like(ids)
    padded[1, :21] = 0
    policies = [(small_policy(name), None) for name in sparsekv.POLICIES]
    for policy, kv_dtype in policies + [(small_policy("h2o"), form) for form in KV_FORMATS]:
        model = models[DEEPER if policy.prunes else SMALL_SHAPE.num_layers]
        mask = torch.ones_like(ids) if policy.prunes else padded
        sparsekv.patch(model, policy, SMALL_BUDGET, kv_dtype=kv_dtype)
        for extra in ways(policy):
            model.generate(
                ids, attention_mask=mask, max_new_tokens=SMALL_NEW, do_sample=False, **extra
            )
        if device == "cuda":
            torch.cuda.synchronize()
        print(f"{policy.name} {kv_dtype or ''}: done", flush=True)


def small_policy(name: str) -> Policy:
    """A policy by name, ready to run on the model of `small`."""
    return SMALL.get(name) or setting(name, SMALL_SHAPE, SMALL_PROMPT, SMALL_BUDGET).policy


def ways(policy: Policy) -> Iterator[dict[str, Any]]:
    """Arguments of `generate` for each way that a policy allows; what prunes takes no chunks."""
    yield {}
    if not policy.prunes:
        yield {"prefill_chunk_size": 33}
    if "beams" not in policy.refuses:
        yield {"num_beams": 2}


def precision(out: Path) -> None:
    """Logits of the same tokens in bf16, by eager, captured and compiled steps, against fp32."""
    size = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    model = _llama(size | {"num_attention_heads": 32, "num_key_value_heads": 8})
    generator = torch.Generator("cuda").manual_seed(0)
    draw = torch.randint(2, 30_000, (LONG_PROMPT + LONG_NEW,), device="cuda", generator=generator)
    runs = {}
    for compile in (False, True):
        sparsekv.patch(model, "h2o", LONG_BUDGET, compile=compile)
        if not compile:
            runs["eager"] = _forced(model, draw, disable_compile=True)
        name = "compiled" if compile else "captured"
        for again in ("", " again", " a third time"):
            runs[name + again] = _forced(model, draw)
    sparsekv.patch(sparsekv.unpatch(model).float(), "h2o", LONG_BUDGET)
    exact = _forced(model, draw, disable_compile=True)
    lines = []
    for name, logits in runs.items():
        error = (logits - exact).norm(dim=-1) / exact.norm(dim=-1)
        lines.append(f"{name}: relative error by step {[round(x, 4) for x in error.tolist()]}")
    equal = bool((runs["captured"] == runs["eager"]).all())
    lines.append(f"captured equals eager bitwise: {equal}")
    for name in ("captured", "compiled"):  # a first run compiles, the others only replay
        same = bool((runs[f"{name} again"] == runs[f"{name} a third time"]).all())
        lines.append(f"{name} repeats bitwise: {same}")
    (out / "precision.log").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _forced(model: LlamaForCausalLM, draw: Tensor, **kwargs: bool) -> Tensor:
    """fp32 logits [LONG_NEW, V] after a prompt and tokens that are given, whatever they say."""

    def force(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf).index_fill(1, draw[ids.shape[1]], 0.0)

    output = model.generate(
        draw[None, :LONG_PROMPT], max_new_tokens=LONG_NEW, do_sample=False,
        logits_processor=[force], return_dict_in_generate=True, output_logits=True, **kwargs,
    )  # fmt: skip
    return torch.cat(output.logits).float()


def _llama(size: dict, device: str = "cuda") -> LlamaForCausalLM:
    config = LlamaConfig(**size, max_position_embeddings=131_072, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def _logged(command: list[str], log: Path) -> None:
    """Run, show and keep the output; exit as the command does."""
    with log.open("w", buffering=1) as file:  # by line: a run cut short leaves its log
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
        )
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            file.write(line)
    sys.exit(process.wait())


if __name__ == "__main__":
    main()
