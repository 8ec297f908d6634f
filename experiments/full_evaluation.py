"""The full evaluation of a small model on one GPU: a process a task, then one table of all.

    python experiments/full_evaluation.py --data DIR --out DIR --seconds 1200 --jobs 5

A forward of a small model keeps one CPU core busy and a GPU hardly, so processes share the GPU.
quest and pyramidinfer, which answer by decode steps, take as long as all others together and run
last. Records stand in OUT/TASK; the same command again goes on where the last one stopped. The
table is of the questions that every policy has answered.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sparsekv.evaluation.tasks import FULL
from sparsekv.policies import POLICIES, PyramidInfer, Quest

PLAN = Path(__file__).resolve().parent / "plans" / "smollm2.json"
LAST = (Quest.name, PyramidInfer.name)
AGAINST = "snapkv"


def given() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with prose/*.txt and more")
    parser.add_argument("--out", type=Path, required=True, help="folder for results; resumed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", help="Hugging Face id or folder; without it, SmolLM2-135M")
    parser.add_argument("--plan", type=Path, default=PLAN, help="of that model, for planned")
    parser.add_argument("--gates", type=Path, help="of that model, for duo; else measured")
    parser.add_argument("--tasks", nargs="+", default=list(FULL), metavar="TASK")
    parser.add_argument("--samples", type=int, default=100, help="contexts a task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch-tokens", type=int, default=65536, help="of one process's forward")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no forward then")
    parser.add_argument("--jobs", type=int, default=5, help="processes")
    parser.add_argument("--commit", help="what to note where the code has no git history")
    return parser.parse_args()


def command(options: argparse.Namespace, task: str, policies: Sequence[str]) -> list[str]:
    """`sparsekv eval run` of these policies on a task, without a time limit."""
    made = {
        "device": options.device, "data": options.data, "policies": ",".join(policies),
        "tasks": task, "samples": options.samples, "seed": options.seed,
        "batch-tokens": options.batch_tokens, "out": options.out / task, "model": options.model,
        "commit": options.commit,
    }  # fmt: skip
    made["plan"] = options.plan if "planned" in policies else None
    made["gates"] = options.gates if "duo" in policies else None
    words = [word for key, value in made.items() if value is not None
             for word in (f"--{key}", str(value))]  # fmt: skip
    return [sys.executable, "-m", "sparsekv", "eval", "run", "--full", "--resume", *words]


def run(line: list[str], log: Path, deadline: float) -> int:
    """A shard, if there is time left; its exit code."""
    left = deadline - time.monotonic()
    if left <= 0:
        return 0
    limit = [] if left == float("inf") else ["--seconds", f"{left:.0f}"]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        return subprocess.run([*line, *limit], stdout=file, stderr=subprocess.STDOUT).returncode


def main() -> int:
    """0 when no shard failed and the table is written."""
    options, started = given(), time.monotonic()
    parts = ([name for name in POLICIES if name not in LAST], list(LAST))
    deadline, failed = started + options.seconds, 0
    for policies in parts:
        with ThreadPoolExecutor(options.jobs) as pool:
            lines = [command(options, task, policies) for task in options.tasks]
            logs = [options.out / f"{task}.log" for task in options.tasks]
            codes = list(pool.map(run, lines, logs, [deadline] * len(lines)))
        for log, code in zip(logs, codes, strict=True):
            if code:
                print(f"error: {log} says why a shard ended with {code}", file=sys.stderr)
                failed += 1
    folders = [str(options.out / task) for task in options.tasks]
    table = ["eval", "table", *folders, "--common", "--against", AGAINST, "--out", str(options.out)]
    return subprocess.run([sys.executable, "-m", "sparsekv", *table]).returncode or int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
