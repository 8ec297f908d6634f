"""One rank of test_tensor_parallel.py: `torchrun tensor_parallel_worker.py FOLDER`.

Loads the models that the test saved in FOLDER, sharded over all ranks, and writes what it saw to
FOLDER/rank<r>.json. `observe` is also what the test runs in a single process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from rig import greedy, kept, left_padded, prompt
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import sparsekv
from sparsekv.policies import (
    H2O,
    AdaKV,
    CriticalKV,
    Expected,
    Knorm,
    LayerSplit,
    Pyramid,
    SnapKV,
)

POLICIES = {
    "full": "full",
    "snapkv": SnapKV(window=8),
    "h2o": H2O(),
    "pyramid": Pyramid(window=4, beta=4),
    "layersplit": LayerSplit(full_layers=1, window_rows=8),
    "knorm": Knorm(),
    "expected": Expected(),
    "criticalkv": CriticalKV(SnapKV(window=8)),
    "adakv": AdaKV(SnapKV(window=8)),
}
# Every rank shares the budget of a layer among its own heads.
BY_RANK = ("adakv",)
BUDGET, NEW = 24, 8


def observe(model: PreTrainedModel) -> dict[str, Any]:
    """By policy: tokens [B][NEW], kept columns [row][layer][local head], memory of this rank."""
    batch = left_padded(prompt(60), prompt(41, 1))
    seen = {}
    for name, policy in POLICIES.items():
        sparsekv.patch(model, policy, BUDGET)
        run = greedy(model, batch["input_ids"], NEW, attention_mask=batch["attention_mask"])
        seen[name] = {
            "tokens": run.tokens.tolist(),
            "kept": [kept(run.cache, row) for row in range(2)],
            "pages": run.cache.report().pages_used,
        }
    sparsekv.unpatch(model)
    return seen


def refusal(model: PreTrainedModel, policy: str = "snapkv") -> dict[str, Any]:
    """What `patch` says to a model whose KV heads do not divide, or to a policy."""
    try:
        sparsekv.patch(model, policy, BUDGET)
    except ValueError as error:
        return {"error": str(error), "attention": model.config._attn_implementation}
    return {"error": None}


def main(folder: Path) -> None:
    torch.set_num_threads(1)

    def load(name: str) -> PreTrainedModel:
        config = DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]))
        return AutoModelForCausalLM.from_pretrained(folder / name, distributed_config=config).eval()

    even = load("even")
    seen = {"even": observe(even), "together": refusal(even, "chunked")}
    seen["uneven"] = refusal(load("uneven"))
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
