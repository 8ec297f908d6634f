"""kvpress's SnapKV with 10 % kept, random weights: milliseconds to the first token and a token.

    python kvpress_snapkv.py FOLDER_WITH_CONFIG

The last line of stdout is JSON: {"ttft 4000": ms, "token 4000": ms, "ttft 32000": ms, ...}.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

LENGTHS = (4000, 32000)
KEPT = 0.1
SHORT, LONG = 9, 41  # new tokens; what differs between the two is decode steps alone


def main() -> None:
    """Measure and print."""
    import torch
    from kvpress import SnapKVPress
    from transformers import AutoConfig, LlamaForCausalLM

    config = AutoConfig.from_pretrained(sys.argv[1])
    config._attn_implementation = "sdpa"
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config).eval()
    press = SnapKVPress(compression_ratio=1 - KEPT)
    figures: dict[str, float] = {}
    for tokens in LENGTHS:
        ids = torch.randint(2, 1000, (1, tokens), device="cuda")
        seconds(model, press, ids, 2)
        first = sorted(seconds(model, press, ids, 1) for _ in range(3))[1]
        more = seconds(model, press, ids, LONG) - seconds(model, press, ids, SHORT)
        figures |= {f"ttft {tokens}": first * 1e3, f"token {tokens}": more / (LONG - SHORT) * 1e3}
    print(json.dumps(figures))


def seconds(model: Any, press: Any, ids: Any, new: int) -> float:
    """Wall time of one greedy generation of exactly `new` tokens."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.no_grad(), press(model):
        model.generate(ids, min_new_tokens=new, max_new_tokens=new, do_sample=False)
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
