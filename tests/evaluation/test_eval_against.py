"""Differences between two policies: worked out by hand, and what must hold of them."""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import pytest
from test_eval_table import AWARE, DENSE, LM, REFUSED, SNAP, records

from sparsekv.evaluation.against import differences, write
from sparsekv.evaluation.cells import collect

# Right where SnapKV is right, and for one question more of each context: always 1/2 better.
BETTER = records("t", "kvzip", 64, [[1.0, 1.0], [1.0, 0.0]], kv_bytes=3 * (1 << 20))
LM_BETTER = records("lm", "kvzip", 64, [[2.0], [3.0]], "nll")


def test_by_hand():
    cells = collect([*DENSE, *SNAP, *BETTER, *LM, *LM_BETTER, *REFUSED])
    average, *tasks = differences(cells, "snapkv")
    assert [d.task for d in tasks] == ["lm", "t"] and average.task == "average"
    lm, t = tasks
    # The dense differences overlap, [-1, -.5] and [-.5, 0]; the paired one is certain.
    assert (t.score, t.other, t.difference, t.low, t.high) == (0.75, 0.25, 0.5, 0.5, 0.5)
    assert (t.contexts, t.ratio, t.verdict, t.protocol, t.budget) == (2, 1.5, "better", AWARE, 64)
    gain = 1 - math.exp(-0.5)
    assert lm.difference == pytest.approx(gain)
    assert average.difference == pytest.approx((0.5 + gain) / 2) and average.contexts == 4
    assert average.ratio == pytest.approx(1.25)


def test_turned_round():
    cells = collect([*DENSE, *SNAP, *BETTER])
    (up, *_), (down, *_) = differences(cells, "snapkv"), differences(cells, "kvzip")
    assert (down.low, down.high, down.verdict) == (-up.high, -up.low, "worse")


def test_what_cannot_be_paired_has_no_line():
    other_budget = records("t", "kvzip", 128, [[1.0, 1.0], [1.0, 0.0]])
    assert differences(collect([*DENSE, *SNAP, *other_budget, *REFUSED]), "snapkv") == []
    assert differences(collect([*SNAP, *BETTER]), "snapkv") == []
    with pytest.raises(ValueError, match="expected a policy of these results, kvzip, snapkv, got"):
        differences(collect([*DENSE, *SNAP, *BETTER]), "h2o")


def test_written_as_csv(tmp_path):
    lines = differences(collect([*DENSE, *SNAP, *BETTER]), "snapkv")
    path = write(lines, "snapkv", tmp_path / "new")
    assert path.name == "against-snapkv.csv"
    rows = list(csv.DictReader(path.open()))
    assert [row["verdict"] for row in rows] == ["better", "better"]
    assert [float(row["difference"]) for row in rows] == [0.5, 0.5]


def test_one_context_decides_nothing(tmp_path):
    one = [r for r in [*DENSE, *SNAP, *BETTER] if r.example == "e0"]
    average, line = differences(collect([*one]), "snapkv")
    assert (line.difference, line.low, line.high, line.verdict) == (0.5, None, None, "open")
    assert (average.verdict, average.tasks) == ("open", 1)
    assert ",0.5,,," in write([line], "snapkv", tmp_path).read_text()


def test_bytes_are_of_the_questions_that_both_have():
    """A run that was stopped has answered the shortest contexts first."""
    long = [replace(r, kv_bytes=9 << 20) if r.example == "e1" else r for r in SNAP]
    half = [r for r in BETTER if r.example == "e0"]
    assert {d.ratio for d in differences(collect([*DENSE, *long, *half]), "snapkv")} == {1.5}
