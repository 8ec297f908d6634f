"""What a result file says about where and with what it was measured."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import sparsekv

_PACKAGES = ("triton", "transformers", "flashinfer-python", "vllm", "kvpress")


def describe(device: torch.device, commit: str | None) -> dict[str, Any]:
    """Device, driver, versions, commit, command line and date.

    commit: what to say where the code has no git history; None: ask git.
    """
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or "cpu",
        "driver": driver() if on_gpu else "none",
        "cuda": torch.version.cuda or "none",
        "torch": torch.__version__,
        **{name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "sparsekv": sparsekv.__version__,
        "commit": commit or _commit(),
        "command": shlex.join(["sparsekv", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def driver() -> str:
    """Version of NVIDIA's driver, or "unknown"."""
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Of the checkout that this package lies in, with a mark if files were changed."""
    folder = str(Path(__file__).resolve().parent)
    head = _output("git", "-C", folder, "rev-parse", "--short", "HEAD")
    dirty = _output("git", "-C", folder, "status", "--porcelain", "--untracked-files=no")
    return head if head == "unknown" or not dirty else f"{head} with changes"


def _output(*command: str) -> str:
    """First line of a command's output; "unknown" if it cannot be run, "" if it says nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return (done.stdout.strip().splitlines() or [""])[0]
