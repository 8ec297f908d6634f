"""The full evaluation of a small model on one GPU: many processes, then a table of all.

    python experiments/full_evaluation.py --data DIR --out DIR --seconds 1200 --jobs 14

A forward of a small model keeps one CPU core busy and a GPU hardly, so processes share the GPU: a
shard is a task under one protocol, and keydiff and kvzip, which read prompts of their own, have one
to themselves. Records stand in a folder a shard; the same command again goes on where the last one
stopped. quest and pyramidinfer, which answer by decode steps, take as long as all others together:
they run last, into OUT/by-steps. A table is of the questions that all of its policies have
answered: that in OUT without these two, that in OUT/by-steps with them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from sparsekv.evaluation.records import PROTOCOLS
from sparsekv.evaluation.results import RESULTS
from sparsekv.evaluation.tasks import FULL
from sparsekv.policies import POLICIES, Duo, KeyDiff, KVzip, Planned, PyramidInfer, Quest

PLAN = Path(__file__).resolve().parent / "plans" / "smollm2.json"
# Their shards are called after them; those of all others after the task and protocol alone.
OWN, LAST, BY_STEPS = (KeyDiff.name, KVzip.name), (Quest.name, PyramidInfer.name), "by-steps"
# Tasks without a question: one run answers for both protocols.
BOTH, WHOLE = "both", ("lm-prose-2k", "lm-code-2k")
AGAINST = "snapkv"
SPARSEKV = (sys.executable, "-m", "sparsekv", "eval")


class Shard(NamedTuple):
    """What one process runs into a folder."""

    task: str
    protocol: str
    policies: tuple[str, ...]
    folder: Path


def given() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with prose/*.txt and more")
    parser.add_argument("--out", type=Path, required=True, help="folder for results; resumed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", help="Hugging Face id or folder; without it, SmolLM2-135M")
    parser.add_argument("--plan", type=Path, help="of that model, for planned; else measured")
    parser.add_argument("--gates", type=Path, help="of that model, for duo; else measured")
    parser.add_argument("--tasks", nargs="+", default=list(FULL), metavar="TASK")
    parser.add_argument("--samples", type=int, default=100, help="contexts a task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch-tokens", type=int, default=32768, help="of one process's forward")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no forward then")
    parser.add_argument("--jobs", type=int, default=14, help="processes")
    parser.add_argument("--commit", help="what to note where the code has no git history")
    return parser.parse_args()


def planned(options: argparse.Namespace, out: Path, *groups: Sequence[str]) -> list[Shard]:
    """A shard for each group of policies, task and protocol."""
    found = []
    for group in groups:
        names = tuple(name for name in POLICIES if name in group)
        own = "-".join(("", *names)) if group in (OWN, LAST) else ""
        for task in options.tasks if names else ():
            for protocol in (BOTH,) if task in WHOLE else PROTOCOLS:
                found.append(Shard(task, protocol, names, out / f"{task}-{protocol}{own}"))
    return found


def command(options: argparse.Namespace, shard: Shard) -> list[str]:
    """`sparsekv eval run` of a shard."""
    plan = options.plan or (PLAN if options.model is None else None)
    made = {
        "device": options.device, "data": options.data, "policies": ",".join(shard.policies),
        "tasks": shard.task, "protocol": shard.protocol, "samples": options.samples,
        "seed": options.seed, "out": shard.folder, "batch-tokens": options.batch_tokens,
        "model": options.model, "commit": options.commit,
        "plan": plan if Planned.name in shard.policies else None,
        "gates": options.gates if Duo.name in shard.policies else None,
    }  # fmt: skip
    words = [(f"--{key}", str(value)) for key, value in made.items() if value is not None]
    return [*SPARSEKV, "run", "--full", "--resume", *(word for pair in words for word in pair)]


def run(line: list[str], log: Path, deadline: float) -> int:
    """A shard, if there is time left; its exit code."""
    left = deadline - time.monotonic()
    if left <= 0:
        return 0
    limit = [] if left == float("inf") else ["--seconds", f"{left:.0f}"]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        return subprocess.run([*line, *limit], stdout=file, stderr=subprocess.STDOUT).returncode


def shards(options: argparse.Namespace, wanted: Sequence[Shard], deadline: float) -> list[Path]:
    """Run all of them; the folders that have records. A failure is told."""
    lines = [command(options, shard) for shard in wanted]
    logs = [shard.folder.with_suffix(".log") for shard in wanted]
    with ThreadPoolExecutor(options.jobs) as pool:
        codes = list(pool.map(run, lines, logs, [deadline] * len(lines)))
    for log, code in zip(logs, codes, strict=True):
        if code:
            print(f"error: {log} says why a shard ended with {code}", file=sys.stderr)
    files = (shard.folder / RESULTS for shard in wanted)
    return [file.parent for file in files if file.exists() and file.stat().st_size]


def tabulate(folders: Sequence[Path], out: Path) -> int:
    """The table of what all of them have answered; its exit code."""
    made = ["table", *map(str, folders), "--common", "--against", AGAINST, "--out", str(out)]
    return subprocess.run([*SPARSEKV, *made]).returncode


def main() -> int:
    """0 when both tables are written, or the first one, if there was no time for the second."""
    options = given()
    deadline = time.monotonic() + options.seconds
    others = [name for name in POLICIES if name not in (*OWN, *LAST)]
    first = planned(options, options.out, others, OWN)
    last = planned(options, options.out / BY_STEPS, LAST)
    found = shards(options, [*first, *last], deadline)
    begun = [shard.folder for shard in first if shard.folder in found]
    if not begun:
        return 1
    code = tabulate(begun, options.out)
    return code or (tabulate(found, options.out / BY_STEPS) if len(found) > len(begun) else 0)


if __name__ == "__main__":
    sys.exit(main())
