"""Results that are being written survive a kill, and go on only as they began."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sparsekv import cli
from sparsekv.evaluation.records import Record
from sparsekv.evaluation.results import RESULTS, RUN, Results, read_config, read_records

CONFIG = {"model": "m", "seed": 0, "samples": {"a": 2}, "history": [{"commit": "1"}]}
RECORD = Record("a", "snapkv", 256, "question-aware", example="0", question="q", headline="em")


def many(count: int) -> list[Record]:
    made = replace(RECORD, text="écrit 写")
    return [replace(made, question=str(i), em=float(i % 2), nll=i / 7) for i in range(count)]


@settings(max_examples=10)
@given(
    budget=st.none() | st.integers(1, 512) | st.floats(0.01, 1.0),
    text=st.none() | st.text(),
    nll=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    fields=st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text()),
)
def test_a_record_survives_json(budget, text, nll, fields):
    record = replace(RECORD, budget=budget, text=text, nll=nll, settings=fields)
    assert Record.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_what_is_at_its_default_is_not_written():
    named = {"task", "policy", "budget", "protocol", "example", "question", "headline"}
    assert set(RECORD.to_dict()) == named
    for wrong in ({"task": "a"}, {**RECORD.to_dict(), "colour": "red"}):
        with pytest.raises(ValueError, match="expected a record with fields of"):
            Record.from_dict(wrong)


def test_records_are_on_the_disk_when_add_returns(tmp_path):
    with Results(tmp_path, CONFIG) as results:
        results.add(many(3))
        assert list(read_records(tmp_path)) == many(3)
        results.add(many(5)[3:])
    assert list(read_records(tmp_path)) == many(5)


@settings(max_examples=15)
@given(cut=st.integers(0, 400))
@example(cut=5)  # within a character
def test_a_torn_last_line_is_dropped(tmp_path_factory, cut):
    """Wherever the file was cut, whole lines stay and the run goes on behind them."""
    folder = tmp_path_factory.mktemp("torn")
    with Results(folder, CONFIG) as results:
        results.add(many(4))
    whole = (folder / RESULTS).read_bytes()
    torn = whole[: max(len(whole) - cut, 0)]
    (folder / RESULTS).write_bytes(torn)
    left = torn.count(b"\n")
    with Results(folder, CONFIG, resume=True) as results:
        assert results.records == many(4)[:left]
        results.add(many(4)[left:])
    assert (folder / RESULTS).read_bytes() == whole


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    with Results(tmp_path, CONFIG) as results:
        results.add(many(3))
    lines = (tmp_path / RESULTS).read_text().splitlines()
    (tmp_path / RESULTS).write_text("\n".join([lines[0], lines[1][:-9], lines[2], ""]))
    with pytest.raises(ValueError, match="expected a record in line 2 of"):
        Results(tmp_path, CONFIG, resume=True)


def test_a_folder_with_results_is_not_written_over(tmp_path):
    with Results(tmp_path, CONFIG) as results:
        results.add(many(1))
    with pytest.raises(ValueError, match="expected --resume or a folder without results"):
        Results(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("name", "value"), [("model", "other"), ("seed", 1), ("samples", {"a": 3})]
)
def test_a_changed_configuration_is_refused(tmp_path, name, value):
    Results(tmp_path, CONFIG).__exit__(None, None, None)
    with pytest.raises(ValueError, match=f"expected the {name}.* of the run that is resumed"):
        Results(tmp_path, CONFIG | {name: value}, resume=True)
    assert read_config(tmp_path) == CONFIG


def test_tasks_may_be_added_and_the_history_grows(tmp_path):
    Results(tmp_path, CONFIG).__exit__(None, None, None)
    later = CONFIG | {"samples": {"b": 7}, "history": [{"commit": "2"}]}
    Results(tmp_path, later, resume=True).__exit__(None, None, None)
    config = read_config(tmp_path)
    assert config["samples"] == {"a": 2, "b": 7}
    assert config["history"] == [{"commit": "1"}, {"commit": "2"}]


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(ValueError, match=f"expected {RUN} of an evaluation in"):
        read_config(tmp_path)
    with pytest.raises(ValueError, match=f"expected {RESULTS} of an evaluation in"):
        list(read_records(tmp_path))


def arguments(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        "eval", "--model", str(model), "--device", "cpu", "--dtype", "float32", "--data", str(data),
        "--out", str(out), "--policies", "streaming,snapkv", "--budgets", "32", "--tasks", "icl-1k",
        "--samples", "4", "--batch-tokens", "1024", *more,
    ]  # fmt: skip


def lines(folder: Path) -> int:
    path = folder / RESULTS
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_killed_run_loses_no_finished_item(folder, data, tmp_path):
    """SIGKILL in the middle, then --resume: every item once, with the results of a run in peace."""
    torch.set_num_threads(1)  # as the other process: sums in the same order
    peace, killed = tmp_path / "peace", tmp_path / "killed"
    assert CliRunner().invoke(cli.APP, arguments(folder, data, peace)).exit_code == 0
    total = lines(peace)
    process = subprocess.Popen(
        [sys.executable, "-m", "sparsekv", *arguments(folder, data, killed)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while lines(killed) < total // 3:
        assert process.poll() is None, "ended before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = list(read_records(killed))
    assert total // 3 <= len(left) < total
    with (killed / RESULTS).open("a") as file:
        file.write('{"task": "torn')
    again = arguments(folder, data, killed, "--resume")
    assert CliRunner().invoke(cli.APP, again).exit_code == 0
    found = list(read_records(killed))
    assert found[: len(left)] == left
    times = {"prefill_ms": 0.0, "decode_ms": 0.0}
    expected = {record.key: replace(record, **times) for record in read_records(peace)}
    assert len(found) == len(expected) == total
    assert {record.key: replace(record, **times) for record in found} == expected
    changed = CliRunner().invoke(cli.APP, [*again, "--seed", "1"])
    assert changed.exit_code == 2
    assert "error: expected the seed of the run that is resumed" in changed.stderr
