"""Stands in for the process with vLLM: says what it was asked, and figures that it makes up.

    python serve_worker.py NOTES [die|hang] PLAN.json

NOTES gets a line of JSON with the plan. A sparse mode is twice as fast as a dense one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    with open(sys.argv[-1], encoding="utf-8") as file:
        plan = json.load(file)
    how = sys.argv[2] if len(sys.argv) > 3 else ""

    def tell(event: dict[str, Any], path: str = plan["events"]) -> None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    flags = {name: os.environ.get(name) for name in ("VLLM_PLUGINS", "HF_HUB_OFFLINE")}
    tell(plan | {"flags": flags}, sys.argv[1])
    ready = {"device": "abacus", "vllm": "0.0", "vocab": 99, "blocks": 9, "block_bytes": 1e6}
    ready |= {"block_size": 16, "step_tokens": 64, "seconds": 1.5, "pid": os.getpid()}
    tell({"ready": ready})
    fast = 2.0 if plan["sparse"] else 1.0
    for index, workload in enumerate(plan["workloads"]):
        if how and index == 1:
            print(
                "ValueError: no room for it\nRuntimeError: Engine core initialization failed. Look"
            )
            sys.stdout.flush()
            if how == "die":
                sys.exit(3)
            time.sleep(60)
        load = workload["concurrency"] or workload["rate"]
        figures = {"out_tok_s": 100.0 * fast * load, "total_tok_s": 900.0 * fast * load}
        figures |= {"ttft_p50_ms": 50.0 * load / fast, "ttft_p99_ms": 70.0 * load, "failures": 0.0}
        figures |= {"running_mean": load * 0.9, "running_max": load, "kv_gib_max": 6.0 / fast}
        tell({"workload": index, "status": "measured", "reason": "", "figures": figures})


if __name__ == "__main__":
    main()
