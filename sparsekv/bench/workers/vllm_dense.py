"""vLLM with dummy weights: milliseconds a decode step and to the first token.

    python vllm_dense.py FOLDER_WITH_CONFIG

The last line of stdout is JSON: {"1 4000": ms, "20 4000": ms, "64 4000": ms, "ttft 4000": ms}.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

TOKENS = 4000
BATCHES = (1, 20, 64)
SHORT, LONG = 33, 289  # new tokens; what differs between the two is decode steps alone


def main() -> None:
    """Measure and print."""
    from vllm import LLM

    llm = LLM(
        model=sys.argv[1], skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16",
        max_model_len=TOKENS + 512, max_num_seqs=max(BATCHES), gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
    )  # fmt: skip
    seconds(llm, 1, 4)
    ttft = sorted(seconds(llm, 1, 1) for _ in range(3))[1]
    figures = {f"ttft {TOKENS}": ttft * 1e3}
    for rows in BATCHES:
        steps = [seconds(llm, rows, LONG) - seconds(llm, rows, SHORT) for _ in range(2)]
        figures[f"{rows} {TOKENS}"] = min(steps) / (LONG - SHORT) * 1e3
    print(json.dumps(figures))


def seconds(llm: Any, rows: int, new: int) -> float:
    """Wall time of `rows` requests of `new` tokens each, greedy, none ending early."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [2 + (7 * row + i) % 1000 for i in range(TOKENS)]}
        for row in range(rows)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
