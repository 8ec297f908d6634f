"""A process with one vLLM engine, which all workloads of a mode are sent to.

    python -m sparsekv.bench.serve.worker PLAN.json

What it measures it appends to the plan's file of events, a JSON object a line: first `ready`, then
a report of each workload.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from sparsekv.bench.serve.session import Session
from sparsekv.bench.serve.steps import StepLog
from sparsekv.bench.serve.vllm_engine import VllmEngine, check_plugin
from sparsekv.bench.serve.workload import Workload


def main() -> None:
    """Measure what the plan says."""
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if os.getpgrp() == os.getpid():  # started by `processes`, not by hand
        threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(run(plan))


async def run(plan: dict[str, Any]) -> None:
    """plan: engine, sparse, workloads, seed, warmup, timeout, deadline (time.time()), events."""
    events = Path(plan["events"])

    def tell(event: dict[str, Any]) -> None:
        with events.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    if plan["sparse"]:
        check_plugin()
    began, log = time.monotonic(), StepLog()
    engine = VllmEngine(plan["engine"], log)
    try:
        about = await engine.about()
        tell({"ready": about | {"seconds": round(time.monotonic() - began, 1)}})
        session = Session(
            engine, about["vocab"], plan["seed"], plan["warmup"], plan["timeout"], log,
            about["blocks"], about["block_bytes"],
        )  # fmt: skip
        workloads = [Workload(**one) for one in plan["workloads"]]
        await session.all(workloads, lambda: time.time() > plan["deadline"], tell)
    finally:
        engine.shutdown()


def _end_with_parent() -> None:
    """The parent holds the other end of stdin: when it is gone, so are we and vLLM's processes."""
    while os.read(0, 1):  # sys.stdin's lock would be in the way of our own end
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
