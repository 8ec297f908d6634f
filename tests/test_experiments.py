"""Experiments on a tiny random model: units resume, tables compare on the same contexts, and
docs/results.md is what the committed tables say."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import save_tiny_model

from sparsekv.evaluation import cells, table
from sparsekv.evaluation.records import PROTOCOLS, Record
from sparsekv.policies import H2O, LayerSplit, SnapKV

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "experiments"
sys.path.insert(0, str(SCRIPTS))

import decode_time  # noqa: E402
import full_evaluation  # noqa: E402
import outcome  # noqa: E402
import report  # noqa: E402
import run_all  # noqa: E402
import score_fidelity  # noqa: E402
import units  # noqa: E402
from experiment import Experiment, summarise, write_run  # noqa: E402

# With one of its two layers in full, an average of 32 cannot be kept of 1024 tokens.
UNPAYABLE = LayerSplit(full_layers=1, budget_is="average")
TINY = Experiment(
    name="tiny",
    question="Does it run?",
    arms=(
        *(units.Arm("one", SnapKV(window=4, kernel=1), budget) for budget in (32, 64)),
        *(units.Arm("three", SnapKV(window=4, kernel=3), budget) for budget in (32, 64)),
        units.Arm("unpayable", UNPAYABLE, 32),
        units.Arm("small", SnapKV(window=4, kernel=1), 32, "int8"),
    ),
    tasks=("recall-1k", "lm-prose-2k"),
    against={"three": "one", "small": "one"},
)
WORDS = ("the", "quick", "brown", "fox", "jumps.", "Over", "a", "lazy", "dog", "seven", "wizards.")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> units.Options:
    """A tiny model, and a book of random words."""
    folder = tmp_path_factory.mktemp("experiments")
    rng = np.random.default_rng(0)
    (folder / "data" / "prose").mkdir(parents=True)
    text = "\n\n".join(" ".join(rng.choice(WORDS, 60)) for _ in range(120))
    (folder / "data" / "prose" / "book.txt").write_text(text)
    model = save_tiny_model(folder / "model")
    (folder / "out").mkdir()
    return units.Options(folder / "data", folder / "out", "cpu", "float32", str(model), samples=3)


@pytest.fixture(scope="module")
def session(options: units.Options) -> units.Session:
    return units.Session(options)


@pytest.fixture(scope="module")
def rows(options: units.Options, session: units.Session) -> list[dict[str, Any]]:
    """The table of a finished run, as read back from its file."""
    for group in units.groups(TINY.units(options), options):
        units.do(session, group)
    summarise(TINY, options)
    write_run(options, 1.0)
    return outcome.read_csv(options.out / "tiny.csv")


def test_a_unit_is_done_once_its_file_is_whole(
    options: units.Options, session: units.Session
) -> None:
    """Half-written files do not count, groups share what they read, and nothing is done twice."""
    every = TINY.units(options)
    todo = units.groups([*every, *every], options)
    assert sum(map(len, todo)) == len({unit.key for unit in every}) == len(every)
    both = [unit for group in todo for unit in group if group[0].key == todo[2][0].key]
    assert {unit.work.budget for unit in both} == {32, 64}
    unit = todo[0][0]
    draft = unit.file(options).with_suffix(".123")
    draft.parent.mkdir(parents=True, exist_ok=True)
    draft.write_text('{"exam')
    assert unit.records(options) is None
    units.do(session, todo[0])
    left = units.groups(every, options)
    assert [group[0].key for group in left] == [group[0].key for group in todo[1:]]
    assert len(unit.records(options) or []) == options.samples * units.QUESTIONS


def test_a_row_is_a_cell(rows: list[dict[str, Any]], options: units.Options) -> None:
    """Scores and differences are those of the records; a refusal says why."""
    own = [row for row in rows if row["task"] != outcome.ALL]
    assert len(own) == 7 * 3  # arms with the dense one; two protocols and one
    key = ("recall-1k", "question-agnostic")
    mine = (row for row in own if (row["task"], row["protocol"]) == key)
    cell = {(row["arm"], row["budget"]): row for row in mine}
    found = {}
    for arm in (TINY.arms[0], TINY.arms[2]):
        records = units.cell_unit(options, arm, *key).records(options)
        found[arm.label] = outcome.by_context(records or [])
        row = cell[arm.label, 32]
        assert row["score"] == pytest.approx(np.mean(list(found[arm.label].values())), abs=1e-5)
        assert row["kept"] == 32 and row["contexts"] == 3
        assert row["low"] <= row["score"] <= row["high"]
    gaps = [found["three"][c] - found["one"][c] for c in found["one"]]
    assert cell["three", 32]["to_other"] == pytest.approx(np.mean(gaps), abs=1e-5)
    assert cell["small", 32]["kv_bytes"] < 0.4 * cell["one", 32]["kv_bytes"]
    refused = cell["unpayable", 32]
    assert refused["score"] is None and "expected an average budget" in refused["refused"]


def test_a_comparison_weighs_budgets_alike(rows: list[dict[str, Any]]) -> None:
    """One task of a kind here: the mean of its budgets."""
    whole = [r for r in rows if r["task"] == outcome.ALL and r["arm"] == "three"]
    assert [(r["protocol"], r["metric"]) for r in whole] == [
        ("question-aware", "accuracy"), ("question-agnostic", "accuracy"),
        ("question-agnostic", "nll"),
    ]  # fmt: skip
    for row, task in zip(whole, ("recall-1k", "recall-1k", "lm-prose-2k"), strict=True):
        own = [r for r in rows if (r["task"], r["protocol"]) == (task, row["protocol"])]
        gaps = [r["to_other"] for r in own if r["arm"] == "three"]
        assert row["to_other"] == pytest.approx(np.mean(gaps), abs=1e-5)
    assert len(TINY.outcome(rows)) == 3


def test_the_interval_decides() -> None:
    """More accuracy is better, more loss is worse, and an interval over 0 tells nothing."""
    same = {"task": outcome.ALL, "protocol": "p", "other": "base"}
    told = outcome.compared(
        [
            {**same, "arm": arm, "metric": metric, "to_other": (low + high) / 2,
             "to_other_low": low, "to_other_high": high}
            for arm, metric, low, high in (
                ("a", "accuracy", 0.1, 0.2), ("b", "accuracy", -0.2, -0.1),
                ("c", "accuracy", -0.1, 0.2), ("d", "nll", 0.1, 0.2), ("e", "nll", -0.2, -0.1),
            )
        ]
    )  # fmt: skip
    assert told == [
        "p, accuracy against **base**: *better*: a +0.150 [+0.100, +0.200]; "
        "*worse*: b -0.150 [-0.200, -0.100]; *not told apart*: c +0.050 [-0.100, +0.200].",
        "p, nll against **base**: *better*: e -0.150 [-0.200, -0.100]; "
        "*worse*: d +0.150 [+0.100, +0.200].",
    ]
    assert outcome.bootstrap([0.5]) == (0.5, None, None)


def test_evicting_once_and_at_every_step_hold_the_same(session: units.Session) -> None:
    """On average over the steps, to half a token."""
    every = units.Arm("h2o", H2O(), 64)
    once = units.Arm("once", decode_time.PromptOnly(H2O(), spare=3), 64)
    assert decode_time.steps(every, 6, session)[0]["kept"] == 64
    found = decode_time.steps(once, 6, session)
    assert found[0]["kept"] == 64.5 and len(found) == session.options.samples


def test_recorded_sums_are_those_of_eager_attention(session: units.Session) -> None:
    """In float32 nothing but rounding may differ."""
    ids = torch.randint(0, 256, (1, 300), generator=torch.manual_seed(0))
    truth = score_fidelity.eager_sums(session.model, ids)
    for rows in score_fidelity.ROWS:
        sums = score_fidelity.kernel_sums(session.model, ids, rows)
        torch.testing.assert_close(sums, truth[rows], rtol=1e-4, atol=1e-5)


def test_the_driver_runs_what_is_left(
    options: units.Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own; the second call finds all of it done."""
    out = tmp_path / "run"
    command = ["run_all.py", "--data", str(options.data), "--out", str(out), "--device", "cpu"]
    command += ["--model", str(options.model), "--samples", "1", "--only", "score_fidelity"]
    monkeypatch.setattr(sys, "argv", command)
    written = []
    for _ in range(2):
        assert run_all.main() == 0
        written.append([(f.name, f.stat().st_mtime_ns) for f in sorted(out.glob("records/*"))])
    assert written[0] == written[1] and len(written[0]) == len(score_fidelity.DTYPES)
    assert (out / "score_fidelity.csv").exists() and (out / "score_fidelity.png").exists()
    page = report.page(tmp_path, tmp_path / "results.md")
    assert score_fidelity.EXPERIMENT.question in page and "A smoke run" in page


def test_every_experiment_is_documented() -> None:
    """Each has a script of its name and a line in README; what is compared exists."""
    readme = (SCRIPTS / "README.md").read_text(encoding="utf-8")
    for experiment in run_all.EXPERIMENTS:
        assert (SCRIPTS / f"{experiment.name}.py").exists()
        assert f"`{experiment.name}.py`" in readme
        if isinstance(experiment, Experiment):
            labels = {arm.label for arm in experiment.arms}
            assert set(experiment.against) | set(experiment.against.values()) <= labels


def test_an_evaluation_stands_first(tmp_path: Path) -> None:
    """The frontier, then who is best with which interval, from what `sparsekv eval` leaves."""
    folder = tmp_path / "b-evaluation"
    figures = {"headline": "em", "kept": 64.0, "kv_bytes": 64, "dense_kv_bytes": 640}
    scores = {"full": (1.0, 1.0), "snapkv": (1.0, 0.5), "random": (0.0, 0.5)}
    records = [
        Record("needle-1k", policy, None if policy == "full" else 64, protocol,
               example=str(i), question="0", em=score, **figures)
        for protocol in PROTOCOLS
        for policy, both in scores.items()
        for i, score in enumerate(both)
    ]  # fmt: skip
    history = {"command": "sparsekv eval --full", "commit": "abc", "device": "a GPU"}
    config = {"model": "m", "dtype": "bfloat16", "seed": 0, "samples": {"needle-1k": 2}}
    config["history"] = [history | {"torch": "2.11", "date": "2026-11-30"}]
    table.write(cells.collect(records), [config], folder)
    (folder / "run.json").write_text(json.dumps(config))
    page = report.page(tmp_path, tmp_path / "docs" / "results.md")
    assert "![accuracy against memory](../b-evaluation/frontier.png)" in page
    assert "    sparsekv eval --full\n\na GPU, torch 2.11, commit abc, 2026-11-30.\n" in page
    wanted = (
        "question-aware, budget 64, minus dense: snapkv -0.250 [-0.500, +0.000] · random -0.750"
    )
    assert wanted in page and "| snapkv | 0.75 [-0.50, +0.00] |" in page and "A smoke run" in page


def test_the_page_is_what_the_tables_say() -> None:
    """Nobody writes numbers into docs/results.md."""
    written = report.PAGE.read_text(encoding="utf-8")
    assert written == report.page(report.RESULTS, report.PAGE), "python experiments/report.py"


def test_the_full_evaluation_of_two_tasks(
    options: units.Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process a task, a protocol and a group of policies, then tables; without time left nothing
    is begun."""
    given = [
        "x", "--data", str(options.data), "--out", str(tmp_path), "--device", "cpu", "--jobs", "2",
        "--model", str(options.model), "--samples", "1", "--tasks", "recall-1k", "lm-prose-2k",
    ]  # fmt: skip
    monkeypatch.setattr(full_evaluation, "POLICIES", ("full", "snapkv", "keydiff", "streaming"))
    monkeypatch.setattr(full_evaluation, "LAST", ("streaming",))
    monkeypatch.setattr(sys, "argv", given)
    assert full_evaluation.main() == 0
    text = (tmp_path / "table.md").read_text()
    assert "## recall-1k, question-aware" in text and "## lm-prose-2k, question-agnostic" in text
    assert "| streaming | 64 |" not in text and (tmp_path / "against-snapkv.csv").exists()
    assert "| keydiff | 64 |" in text and (tmp_path / "lm-prose-2k-both-keydiff").is_dir()
    assert {folder.name for folder in tmp_path.glob("recall-1k-*/")} == {
        f"recall-1k-{protocol}{own}" for protocol in PROTOCOLS for own in ("", "-keydiff")
    }
    assert "| streaming | 64 |" in (tmp_path / "by-steps" / "table.md").read_text()
    assert full_evaluation.run(["/nowhere"], tmp_path / "log", 0.0) == 0


def test_a_refusal_after_some_answers_is_a_refusal() -> None:
    """A mean over the contexts before it, and zeros for what it kept, are no result."""
    answered = {"example": "a", "headline": "em", "em": 1.0, "kept": 32.0}
    records = [answered, {"refused": "expected x, got y", "headline": "em"}]
    assert outcome.by_context(records) == {}
    assert outcome.summary(records) == {"metric": None, "refused": "expected x, got y"}


def test_a_folder_goes_on_with_its_own_data(options: units.Options, tmp_path: Path) -> None:
    """The names of units do not say on which texts they were measured."""
    own = replace(options, out=tmp_path / "out")
    units.begin(own)
    units.begin(own)
    (tmp_path / "prose").mkdir()
    with pytest.raises(SystemExit, match=r"error: expected what .* was begun with"):
        units.begin(replace(own, data=tmp_path))
