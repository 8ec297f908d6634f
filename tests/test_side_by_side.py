"""The comparison with kvpress: what is recorded is whole, and a new run finds the same.

The new run needs kvpress in an interpreter of its own: pytest --kvpress-python PYTHON.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts" / "side_by_side"
RECORDED = SCRIPTS / "kept.csv"
TIE = 1e-5  # of the scores, in fp32


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def check(found: list[dict[str, str]]) -> None:
    """Equal sets, ties apart: as we are, else with what differs put in, else in the first layer."""
    for row in found:
        tied = row["gap"] != "" and float(row["gap"]) <= TIE
        told = row["told_share"] or row["share"]
        if row["case"].startswith("keydiff, blocks"):
            told = row["lowest"]  # no policy of ours attends the whole prompt and cuts in blocks
        assert float(told) == 1 or (tied and float(told) > 0.999), row


@pytest.fixture
def side_by_side(monkeypatch: pytest.MonkeyPatch):
    """The modules of the scripts, which are no package."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import compare
    import table

    yield compare, table
    for name in ("cases", "compare", "deviations", "reasons", "table"):
        sys.modules.pop(name, None)


def test_the_record_is_whole(side_by_side) -> None:
    """Every case on every prompt, and each agrees or is explained."""
    compare, _ = side_by_side
    wanted = {(case.name, *map(str, cell)) for case, *cell in compare.selected(None)}
    found = rows(RECORDED)
    assert {(r["case"], r["text"], r["tokens"], r["budget"]) for r in found} == wanted
    check(found)


def test_the_document_is_up_to_date(side_by_side) -> None:
    _, table = side_by_side
    text = (ROOT / "docs" / "kvpress.md").read_text(encoding="utf-8")
    command = "python scripts/side_by_side/table.py scripts/side_by_side/kept.csv docs/kvpress.md"
    assert table.updated(text, table.table(RECORDED)) == text, f"run: {command}"


@pytest.mark.slow
def test_a_new_run_agrees(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """All cases again, kvpress in its own process; ten minutes on one core."""
    python = request.config.getoption("--kvpress-python")
    if python is None:
        pytest.skip("needs --kvpress-python, an interpreter that has kvpress 0.5.5")
    script = str(SCRIPTS / "compare.py")
    subprocess.run(
        [sys.executable, script, "--kvpress-python", python, "--out", str(tmp_path)],
        check=True, cwd=ROOT,
    )  # fmt: skip
    found = rows(tmp_path / "kept.csv")
    check(found)
    assert [row["kept"] for row in found] == [row["kept"] for row in rows(RECORDED)]
