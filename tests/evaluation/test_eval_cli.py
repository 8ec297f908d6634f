"""`sparsekv eval` as a user meets it: what it refuses, what it writes, refusals in its table."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from tiny import save_tiny_model
from typer.testing import CliRunner

from sparsekv import cli
from sparsekv.evaluation.results import read_config, read_records


def call(*arguments: object):
    return CliRunner().invoke(cli.APP, ["eval", *map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "snapkv,nope"], "expected a policy of full, streaming, h2o"),
        (["--tasks", "needle-9k"], "expected a task of needle-1k"),
        (["--protocol", "aware"], "expected a protocol of question-aware, question-agnostic, got"),
        (["--budgets", "64,many"], "expected a budget like 512 or 0.25, got 'many'"),
        (["--budgets", "0"], "budget"),
        (["--data", "/nowhere"], "expected --data to be a folder, got '/nowhere'"),
        (["--samples", "0"], "expected --samples >= 1, got 0"),
        (["--feed", "slowly"], "expected --feed chunk or steps, got 'slowly'"),
        (["--batch-tokens", "0"], "expected --batch-tokens >= 1, got 0"),
        (["--gates", "gates.json"], "expected --gates with the policy duo"),
        (["--plan", "plan.json"], "expected --plan with the policy planned"),
        (["--device", "abacus"], "expected a usable device, got 'abacus'"),
        (["table", "/nowhere"], "expected run.json of an evaluation in /nowhere"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr and "Traceback" not in result.stderr


def test_tasks_that_need_data_say_so(folder, tmp_path):
    result = call("--model", folder, "--dtype", "float32", "--tasks", "lm-code-2k")
    assert result.exit_code == 2
    assert "error: expected --data with the evaluation texts for texts of" in result.stderr


@pytest.fixture(scope="module")
def evaluated(folder, data, tmp_path_factory) -> Path:
    """Policies that work, one that has no gates, one that is given all pages by steps."""
    out = tmp_path_factory.mktemp("out")
    result = call(
        "--model", folder, "--dtype", "float32", "--tasks", "icl-1k", "--samples", 2, "--out", out,
        "--policies", "quest,duo,snapkv", "--budgets", "32,0.5", "--commit", "abc",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert f"written: {out / 'table.md'}" in result.stdout
    return out


def test_every_setting_is_answered_or_refused(evaluated):
    found = list(read_records(evaluated))
    answered = [record for record in found if record.refused is None]
    assert len({record.key for record in found}) == len(found)
    cells = {record.cell for record in answered}
    assert len(cells) == 2 * (1 + 2 * 2) and len(answered) == 16 * len(cells)
    refused = [record for record in found if record.refused is not None]
    assert {record.policy for record in refused} == {"duo"} and len(refused) == 4
    assert all("expected --gates, or prose in --data" in record.refused for record in refused)
    quest = [record for record in answered if record.policy == "quest"]
    assert all(record.feed == "steps" and record.kept > 1000 for record in quest)
    assert all(record.kv_bytes >= record.dense_kv_bytes and record.note for record in quest)
    assert read_config(evaluated)["history"][0]["commit"] == "abc"


def test_the_table_has_them_all(evaluated):
    text = (evaluated / "table.md").read_text()
    assert "## icl-1k, question-aware" in text and "## average, question-agnostic" in text
    assert text.count("| duo | 32 |") == 4 and "refused: expected --gates" in text
    rows = list(csv.DictReader((evaluated / "table.csv").open()))
    assert {row["policy"] for row in rows} == {"full", "quest", "duo", "snapkv"}
    assert (evaluated / "frontier.png").exists()


def test_tables_of_shards(evaluated, tmp_path):
    result = call("table", evaluated, evaluated, "--out", tmp_path / "both")
    assert result.exit_code == 0, result.output
    once, twice = ((f / "table.csv").read_text() for f in (evaluated, tmp_path / "both"))
    assert once == twice


def test_a_finished_run_has_nothing_to_resume(evaluated, folder):
    before = (evaluated / "results.jsonl").read_bytes()
    same = [
        "--model", folder, "--dtype", "float32", "--tasks", "icl-1k", "--samples", 2, "--policies",
        "quest,duo,snapkv", "--budgets", "32,0.5", "--out", evaluated,
    ]  # fmt: skip
    assert "expected --resume or a folder without results" in call(*same).stderr
    assert call(*same, "--resume").exit_code == 0
    assert (evaluated / "results.jsonl").read_bytes() == before


def test_a_run_that_stops_in_time_goes_on(folder, tmp_path):
    """Nothing begins after --seconds; the rest comes with --resume, and --common cuts a table."""
    line = [
        "--model", folder, "--dtype", "float32", "--tasks", "icl-1k", "--samples", 2, "--policies",
        "snapkv", "--budgets", 32, "--protocol", "question-aware", "--out", tmp_path / "out",
        "--batch-tokens", 1,
    ]  # fmt: skip
    result = call(*line, "--seconds", 0)
    assert result.exit_code == 0 and "time is up: with --resume the same" in result.stdout
    assert not list(read_records(tmp_path / "out"))
    common = ["table", tmp_path / "out", "--common", "--out", tmp_path / "table"]
    assert call(*line, "--resume").exit_code == 0
    assert call(*common).exit_code == 0
    path = tmp_path / "out" / "results.jsonl"
    lost = path.read_text().splitlines(keepends=True)[:-3]
    path.write_text("".join(lost))
    assert call(*common).exit_code == 0
    rows = list(csv.DictReader((tmp_path / "table" / "table.csv").open()))
    assert len({row["items"] for row in rows}) == 1 and rows[0]["items"] != "16"


def test_help_names_the_options():
    result = CliRunner().invoke(cli.APP, ["eval", "run", "--help"], env={"COLUMNS": "200"})
    for option in ("--policies", "--budgets", "--protocol", "--resume", "--full", "--smoke"):
        assert option in result.stdout


def test_prompts_beyond_the_model_are_told(data, tmp_path):
    """Whatever it says behind the last position that it knows says nothing about a policy. Gates
    are not measured there."""
    short = save_tiny_model(tmp_path / "m", max_position_embeddings=1030)
    line = ["--model", short, "--dtype", "float32", "--policies", "duo", "--samples", 1]
    result = call(*line, "--tasks", "icl-1k", "--data", data, "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert all(record.refused is None for record in read_records(tmp_path / "out"))
    assert "beware: icl-1k takes 10" in result.stdout
    assert "tokens, and the model knows 1030 positions" in result.stdout
