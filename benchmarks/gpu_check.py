"""What an issue that touches kernels, cache or decode owes: one run on a CUDA machine.

    python benchmarks/gpu_check.py tests     OUT   # pytest -m gpu
    python benchmarks/gpu_check.py sanitizer OUT   # compute-sanitizer memcheck on small shapes
    python benchmarks/gpu_check.py generate  OUT COMMIT   # Llama-3-8B shape, 32 000 tokens

Each part writes OUT/<part>.log; `generate` writes OUT/generate.json with the commit it is told (the
machine may have no git history). Weights are random. Timings are a record of what ran, beside the
dense model in the same process; they are no claim of speed.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
import triton
from transformers import LlamaConfig, LlamaForCausalLM

import sparsekv
from sparsekv.hf.compat import output_cache

PROMPT, NEW, BUDGET = 32_000, 32, 2048
SMALL_PROMPT, SMALL_NEW, SMALL_BUDGET = 70, 6, 24
ROOT = Path(__file__).resolve().parent.parent
COMMIT = sys.argv[3] if len(sys.argv) > 3 else "not told"


def main() -> None:
    """Run the named part."""
    part, out = sys.argv[1], Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    {"tests": tests, "sanitizer": sanitizer, "generate": generate, "small": small}[part](out)


def tests(out: Path) -> None:
    """The GPU tests of the suite."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    _logged([*command, "-n", "10", "tests"], out / "tests.log")


def sanitizer(out: Path) -> None:
    """Every kernel through every policy on small shapes, under memcheck."""
    script = [sys.executable, __file__, "small", str(out)]
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    _logged([*command, *script], out / "sanitizer.log")


def small(out: Path) -> None:
    """The workload of `sanitizer`."""
    size = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    model = _llama(size | {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512})
    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(2, 500, (2, SMALL_PROMPT), device="cuda", generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :21] = 0
    for name in sparsekv.POLICIES:
        sparsekv.patch(model, name, SMALL_BUDGET)
        for extra in ({}, {"prefill_chunk_size": 33}, {"num_beams": 2}):
            model.generate(
                ids, attention_mask=mask, max_new_tokens=SMALL_NEW, do_sample=False, **extra
            )
        torch.cuda.synchronize()
        print(f"{name}: done", flush=True)


def generate(out: Path) -> None:
    """TTFT, time per token, peak memory and the cache report, dense and under every policy."""
    size = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    model = _llama(
        size | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256}
    )
    rows = [_measure(model, None), *(_measure(model, name) for name in sparsekv.POLICIES)]
    record = {"machine": _machine(), "prompt": PROMPT, "new": NEW, "budget": BUDGET, "rows": rows}
    (out / "generate.json").write_text(json.dumps(record, indent=1) + "\n")


def _measure(model: LlamaForCausalLM, policy: str | None) -> dict:
    sparsekv.unpatch(model)
    if policy is not None:
        sparsekv.patch(model, policy, BUDGET)
    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(2, 128_000, (1, PROMPT), device="cuda", generator=generator)
    _timed(model, ids, 2)  # compile
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first, _ = _timed(model, ids, 1)
    total, output = _timed(model, ids, NEW)
    row = {
        "policy": policy or "dense (transformers, sdpa)",
        "ttft_s": round(first, 4),
        "per_token_ms": round((total - first) / (NEW - 1) * 1e3, 2),
        "peak_extra_gib": round((torch.cuda.max_memory_allocated() - before) / 2**30, 3),
    }
    if policy is not None:
        report = output_cache(output).report().to_dict()
        row |= {name: report[name] for name in ("kept", "kv_bytes", "dense_bytes", "ratio")}
        row["metadata_bytes"] = report["metadata_bytes"]
    print(row, flush=True)
    return row


def _timed(model: LlamaForCausalLM, ids: torch.Tensor, new: int):
    torch.cuda.synchronize()
    start = time.perf_counter()
    output = model.generate(
        ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, return_dict_in_generate=True
    )
    torch.cuda.synchronize()
    return time.perf_counter() - start, output


def _llama(size: dict) -> LlamaForCausalLM:
    config = LlamaConfig(**size, max_position_embeddings=131_072, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def _machine() -> dict:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "sparsekv": sparsekv.__version__,
        "commit": COMMIT,
        "command": "python benchmarks/gpu_check.py generate OUT COMMIT",
    }


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
