"""Make a virtual environment that has pip: `python scripts/bootstrap.py .venv`. Stdlib only.

Debian and Ubuntu ship Python without the wheel that `python -m venv` installs pip from, unless
python3-venv is installed too, which needs root. Without it, pip comes from a pip that is already
there, or from Debian's own package of that wheel, which anybody may download and unpack.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

WHEEL_PACKAGE = "python3-pip-whl"


def run(*command: str | Path, cwd: str | None = None) -> bool:
    """Whether the command succeeded; its words are shown only if it did not."""
    try:
        done = subprocess.run(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except FileNotFoundError:
        return False
    if done.returncode != 0:
        print(f"  {' '.join(map(str, command))}: no ({(done.stdout.split(chr(10)) or [''])[0]})")
    return done.returncode == 0


def install_pip(python: Path, pip: Sequence[str | Path]) -> bool:
    """Let a foreign pip (`pip` is the command) install pip for the interpreter `python`."""
    return run(*pip, "--python", python, "install", "pip")


def from_debian(python: Path) -> bool:
    """Unpack Debian's pip wheel in a temporary folder and install pip with it."""
    with tempfile.TemporaryDirectory() as folder:
        fetch = ("apt-get", "download", WHEEL_PACKAGE)
        if not run(*fetch, cwd=folder):
            # A container image comes without package lists; only root can fetch them.
            if os.geteuid() != 0 or not run("apt-get", "update"):
                return False
            if not run(*fetch, cwd=folder):
                return False
        for package in Path(folder).glob("*.deb"):
            run("dpkg-deb", "-x", package, folder)
        for wheel in Path(folder).glob("usr/share/python-wheels/pip-*.whl"):
            return install_pip(python, (python, wheel / "pip"))
    return False


def main(folder: Path) -> int:
    """0 when `folder` is a virtual environment with pip, else 1."""
    python = folder / "bin" / "python"
    if run(python, "-m", "pip", "--version"):
        return 0
    print(f"making {folder} for Python {sys.version.split()[0]}")
    if run(sys.executable, "-m", "venv", "--clear", folder):
        return 0
    if run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder) and (
        install_pip(python, (sys.executable, "-m", "pip")) or from_debian(python)
    ):
        return 0
    shutil.rmtree(folder, ignore_errors=True)
    print("error: expected a Python with venv and pip; on Debian and Ubuntu: ", file=sys.stderr)
    print("    sudo apt-get install python3-venv", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
