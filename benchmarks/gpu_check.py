"""What an issue that touches kernels, cache or decode owes: one run on a CUDA machine.

    python benchmarks/gpu_check.py tests     OUT   # pytest -m gpu
    python benchmarks/gpu_check.py sanitizer OUT   # compute-sanitizer memcheck on small shapes

Each part writes OUT/<part>.log. Timings are the work of `sparsekv bench`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sparsekv

SMALL_PROMPT, SMALL_NEW, SMALL_BUDGET = 70, 6, 24
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Run the named part."""
    part, out = sys.argv[1], Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    {"tests": tests, "sanitizer": sanitizer, "small": small}[part](out)


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


def _llama(size: dict) -> LlamaForCausalLM:
    config = LlamaConfig(**size, max_position_embeddings=131_072, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    with torch.device("cuda"):
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
