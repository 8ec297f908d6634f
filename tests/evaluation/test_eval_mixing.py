"""Records that were measured in different ways are never averaged: on resuming, in tables."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from test_eval_cli import call
from test_eval_table import DENSE, SNAP

from sparsekv.evaluation import session
from sparsekv.evaluation.cells import collect, merged
from sparsekv.evaluation.results import Results, read_records
from sparsekv.evaluation.session import fingerprint
from sparsekv.policies import Duo

CONFIG = {"model": "m", "seed": 0, "samples": {"t": 2}, "data": "x", "dtype": "bfloat16"}
CONFIG |= {"feed": "chunk"}


@pytest.fixture
def line(folder, tmp_path):
    """A short run of duo; gates of several kinds lie beside it."""
    for name, gates in (("a", ((1.0, 0.0), (0.5, 0.2))), ("b", ((0.0, 1.0), (0.5, 0.2)))):
        Duo(gates, sinks=4, recent=16).save(tmp_path / f"{name}.json")
    Duo(((1.0, 0.0),)).save(tmp_path / "other.json")
    return [
        "--model", folder, "--dtype", "float32", "--tasks", "icl-1k", "--samples", 1, "--policies",
        "duo", "--budgets", 32, "--protocol", "question-aware", "--out", tmp_path / "out",
    ]  # fmt: skip


def test_a_run_does_not_go_on_with_other_gates(line, tmp_path):
    """Nor without any, which would put a refusal over what is measured."""
    gates = ["--gates", tmp_path / "a.json"]
    assert call(*line, *gates).exit_code == 0
    before = (tmp_path / "out" / "results.jsonl").read_bytes()
    other = call(*line, "--gates", tmp_path / "b.json", "--resume")
    assert other.exit_code == 2 and "expected duo as in the run that is resumed" in other.stderr
    none = call(*line, "--resume")
    assert none.exit_code == 2 and "expected duo to be accepted as in the run" in none.stderr
    assert call(*line, *gates, "--resume").exit_code == 0
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == before


def test_measured_gates_and_plans_are_kept(folder, data, tmp_path, monkeypatch):
    """Measured once more, on another machine, their last digits could differ."""
    out = tmp_path / "out"
    line = [
        "--model", folder, "--dtype", "float32", "--tasks", "icl-1k", "--samples", 1, "--data",
        data, "--policies", "duo,planned", "--protocol", "question-aware", "--out", out,
    ]  # fmt: skip
    assert call(*line, "--budgets", 64).exit_code == 0
    for name in ("_measured", "default_plan"):
        monkeypatch.setattr(session, name, None)
    later = call(*line, "--budgets", "64,96", "--resume")
    assert later.exit_code == 0, later.output
    found = {(r.policy, json.dumps(r.settings)): r.refused for r in read_records(out)}
    assert set(found.values()) == {None} and len(found) == 3


def test_a_wrong_file_is_a_mistake_and_no_refusal(line, tmp_path):
    """It says so, and leaves a folder that the right command can be run into."""
    for name, message in (("none", "expected a JSON object"), ("other", "expected gates for 2")):
        wrong = call(*line, "--gates", tmp_path / f"{name}.json")
        assert wrong.exit_code == 2 and message in wrong.stderr
    assert call(*line, "--gates", tmp_path / "a.json").exit_code == 0
    assert all(record.refused is None for record in read_records(tmp_path / "out"))


def test_names_given_twice_are_measured_once(line, tmp_path):
    twice = ["--tasks", "icl-1k,icl-1k", "--protocol", "question-aware,question-aware"]
    assert call(*line, "--policies", "full", *twice).exit_code == 0
    found = list(read_records(tmp_path / "out"))
    assert len(found) == len({record.key for record in found}) == 8


def test_one_slot_is_not_everything(line, tmp_path):
    """1 and 1.0 are equal as numbers, so one would be taken for the other."""
    plain = [*line, "--policies", "snapkv"]
    both = call(*plain, "--budgets", "1,1.0")
    assert both.exit_code == 2 and "expected either 1, a slot, or 1.0, everything" in both.stderr
    assert call(*plain, "--budgets", "1.0").exit_code == 0
    assert "| snapkv | 1.0 |" in (tmp_path / "out" / "table.md").read_text()
    later = call(*plain, "--budgets", "1", "--resume")
    assert later.exit_code == 2 and "expected the budget 1.0 of the run" in later.stderr


@pytest.mark.parametrize(
    "other", [{"budget": 1.0}, {"feed": "steps"}, {"settings": {"gates": "tuple 2"}}]
)
def test_cells_of_two_kinds_are_refused(other):
    own = [replace(record, budget=1, settings={"gates": "tuple 1"}) for record in SNAP]
    collect([*DENSE, *own, *own])
    with pytest.raises(ValueError, match="expected records of snapkv on t of one kind of budget"):
        collect([*DENSE, *own, replace(own[0], question="more", **other)])


def test_every_two_folders_are_compared(tmp_path):
    """Folders that share no task with the first may differ from each other."""
    for name, samples in (("a", {"s": 2}), ("b", {"t": 2}), ("c", {"t": 3})):
        with Results(tmp_path / name, CONFIG | {"samples": samples}) as results:
            results.add(DENSE)
    with pytest.raises(ValueError, match="expected folders of one samples"):
        merged([tmp_path / "a", tmp_path / "b", tmp_path / "c"])


def test_answers_fed_in_two_ways_are_not_compared(tmp_path):
    for feed in ("chunk", "steps"):
        with Results(tmp_path / feed, CONFIG | {"feed": feed}) as results:
            results.add(DENSE)
    with pytest.raises(ValueError, match="expected folders of one feed"):
        merged([tmp_path / "chunk", tmp_path / "steps"])


def test_linked_folders_are_data(tmp_path):
    """Else two folders of other texts, both of links, were taken for the same."""
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}-prose").mkdir()
        (tmp_path / f"{name}-prose" / "a.txt").write_text(name)
        (tmp_path / name / "prose").symlink_to(tmp_path / f"{name}-prose")
        found.append(fingerprint(tmp_path / name))
    assert found[0] != found[1] != fingerprint(None) == "none"
