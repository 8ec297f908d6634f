"""Workers, each in a process of its own: started, followed, and never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sparsekv
from sparsekv.bench.serve.load import reason

_WORKER = "sparsekv.bench.serve.worker"
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 20  # for vLLM to end its processes
# FlashInfer's sampler would be compiled first, and greedy requests do not use it.
_FLAGS = ("VLLM_USE_FLASHINFER_SAMPLER=0", "VLLM_NO_USAGE_STATS=1", "PYTHONUNBUFFERED=1")
_OFFLINE = "HF_HUB_OFFLINE=1"  # a random model has no page on the hub
_NO_PLUGINS = "VLLM_PLUGINS="
# Pinned threads collapse on a CPU that others use as well.
_CPU_FLAGS = ("VLLM_CPU_OMP_THREADS_BIND=nobind", "KMP_BLOCKTIME=0")
_ERROR = re.compile(r"(?:^|\s)([\w.]*(?:Error|Exception|Interrupt): .*)")
_SAYS_NOTHING = "Engine core initialization failed"


@dataclass(frozen=True)
class Interpreter:
    """This Python, as it is started for vLLM.

    site: a folder of further packages. on_gpu: else with flags for a CPU.
    """

    site: str | None = None
    on_gpu: bool = True

    def command(self, plugins: bool, offline: bool) -> list[str]:
        """The start of a command line, up to and with the worker's module.

        plugins: False hides every plugin from vLLM. offline: nothing is asked of the hub.
        """
        root = str(Path(sparsekv.__file__).resolve().parents[1])
        site = [] if self.site is None else [self.site]
        path = [root, *site, *(entry for entry in sys.path if entry)]
        flags = [*_FLAGS, f"PYTHONPATH={os.pathsep.join(dict.fromkeys(path))}"]
        flags += [] if self.on_gpu else _CPU_FLAGS
        flags += [] if plugins else [_NO_PLUGINS]
        flags += [_OFFLINE] if offline else []
        return ["env", *flags, sys.executable, "-m", _WORKER]

    @contextlib.contextmanager
    def packages(self) -> Iterator[None]:
        """For the while, this process finds the packages of `site`, after its own."""
        added = [] if self.site is None else [self.site]
        sys.path.extend(added)
        try:
            yield
        finally:
            for entry in added:
                sys.path.remove(entry)


def follow(command: list[str], plan: dict[str, Any], folder: Path, log: Path) -> Iterator[Any]:
    """Start a worker on `plan` and yield its events as they come.

    folder: for the plan and the events. log: all that the process and its children print. Raises
    RuntimeError with its last words if it ends badly. However this ends, so does the process.
    """
    events = folder / "events.jsonl"
    events.write_text("")
    (folder / "plan.json").write_text(json.dumps(plan | {"events": str(events)}), encoding="utf-8")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(folder / "plan.json")], stdin=subprocess.PIPE, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            with events.open(encoding="utf-8") as lines:
                yield from _events(process, lines)
        finally:
            _end(process)
    if process.returncode:
        raise RuntimeError(f"the worker ended with {process.returncode}: {last_words(log)}")


def _events(process: subprocess.Popen[bytes], lines: Any) -> Iterator[Any]:
    part = ""
    while True:
        ended = process.poll() is not None  # asked first, so that its last line is not missed
        while line := lines.readline():
            part += line
            if part.endswith("\n"):
                yield json.loads(part)
                part = ""
        if ended:
            return
        time.sleep(_POLL_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait a little for one that is ending; then its whole group is killed."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):  # vLLM's processes, if one was left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def last_words(log: Path) -> str:
    """The last error that a log names, other than that there was one."""
    text = log.read_text(encoding="utf-8", errors="replace")
    found = [match[1] for match in map(_ERROR.search, text.splitlines()) if match]
    telling = [line for line in found if _SAYS_NOTHING not in line] or found
    last = telling or text.strip().splitlines() or ["no output"]
    return reason(Exception(last[-1])).removeprefix("Exception: ")
