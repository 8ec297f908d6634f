"""The benchmark harness on a CPU: the whole quick run through the command line, then its parts.

No time is asserted; what is asserted is that every contender of every case leaves a row.
"""

from __future__ import annotations

import builtins
import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from sparsekv import cli
from sparsekv.bench import cli as bench_cli
from sparsekv.bench import plots, registry, results, table, timing
from sparsekv.bench.attention_inputs import paged
from sparsekv.bench.case import Case, Condition, Context, Missing, Round, target
from sparsekv.bench.memory_cases import longest
from sparsekv.bench.runner import Run
from sparsekv.bench.statistic_memory_cases import PEAK

CPU = torch.device("cpu")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli.APP, ["bench", *(str(a) for a in arguments)])


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """One quick run of everything, as a user starts it: without naming a group."""
    out = tmp_path_factory.mktemp("quick")
    result = call("--quick", "--device", "cpu", "--out", out, "--commit", "abc123")
    assert result.exit_code == 0, result.output
    return out, result


# ---------------------------------------------------------------------- the whole run


def test_every_contender_leaves_a_row(quick: tuple[Path, Result]) -> None:
    """All groups; ours is measured everywhere but where a CUDA limit is the point."""
    found = results.read(quick[0])
    expected = [(c.name, name) for c in registry.cases("all", True) for name in c.contenders]
    assert [(row.case, row.contender) for row in found.rows] == expected
    assert {row.group for row in found.rows} == set(registry.GROUPS)
    failed = [(row.case, row.contender, row.reason) for row in found.rows if row.status == "failed"]
    assert not failed
    for row in found.rows:
        if row.status == results.MEASURED:
            assert row.value is not None and row.value > 0 and row.low <= row.value <= row.high
        else:
            assert row.reason and row.value is None
        if row.contender == "ours" and not row.what.startswith(("longest prompt", PEAK)):
            assert row.status == results.MEASURED, row.case


def test_missing_peers_are_told(quick: tuple[Path, Result]) -> None:
    """In the files and on the terminal, with the reason."""
    found = {(row.what, row.contender): row for row in results.read(quick[0]).rows}
    for key in [
        ("paged decode", "flashinfer_tc"),
        ("prefill attention", "sdpa_cudnn"),
        ("time a token", "vllm"),
        ("time to first token", "kvpress"),
        (PEAK, "ours"),
    ]:
        row = found[key]
        assert row.status == results.MISSING and "needs a CUDA device" in row.reason
        assert f"{row.case} | {row.contender} | missing | {row.reason}" in quick[1].output


def test_files_of_a_run(quick: tuple[Path, Result]) -> None:
    out = quick[0]
    record = json.loads((out / "results.json").read_text())
    assert record["machine"]["commit"] == "abc123"
    for key in ("device", "torch", "triton", "transformers", "python", "command", "date"):
        assert record["machine"][key], key
    assert record["ceilings"]["copy_tbs"] > 0 and record["ceilings"]["matmul_tflops"] > 0
    with (out / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(record["rows"])
    assert json.loads(lines[0]["shape"]) == record["rows"][0]["shape"]
    images = {path.name for path in out.glob("*.png")}
    assert images >= {"prefill_roof.png", "decode_roof.png", "token_time.png", "kv_memory.png"}
    assert all((out / name).read_bytes()[1:4] == b"PNG" for name in images)


def test_ratios_and_shares(quick: tuple[Path, Result]) -> None:
    rows = results.read(quick[0]).rows
    ours = {row.case: row for row in rows if row.contender == "ours"}
    for row in rows:
        if row.ratio is not None and row.unit == "ms":
            assert row.ratio == pytest.approx(row.value / ours[row.case].value)
    scores = next(row for name, row in ours.items() if name.startswith("window scores"))
    assert scores.extra["share"] > 0
    assert scores.met == "not judged: tiny shapes"


def test_table_of_a_run(quick: tuple[Path, Result], tmp_path: Path) -> None:
    """A README keeps what stands around the markers; a second writing changes nothing."""
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n\n{table.BEGIN}\nold\n{table.END}\n\nafter\n")
    for _ in range(2):
        result = call("table", quick[0], "--readme", readme)
        assert result.exit_code == 0, result.output
        text = readme.read_text()
        assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
        assert text.count(table.BEGIN) == 1
    assert "### prefill: window scores" in text and "commit abc123" in text
    assert "| policy | settings | prefill ms | ratio to dense | ms a token |" in text
    assert "| what | shape | ours | flashinfer_tc |" in text
    assert "flashinfer_tc: missing in" in text
    widths = {
        line.count("|") for line in text.split("### decode: paged decode\n")[1].splitlines()[:4]
    }
    assert len(widths - {0}) == 1
    printed = call("table", quick[0] / "results.json")
    assert printed.exit_code == 0 and "### memory: KV after prefill" in printed.stdout


# ---------------------------------------------------------------------- the command line


def test_one_group_and_its_selections(tmp_path: Path) -> None:
    result = call("cache", "--quick", "--device", "cpu", "--out", tmp_path, "--only", "top-k")
    assert result.exit_code == 0, result.output
    assert {row.what for row in results.read(tmp_path).rows} == {"top-k"}
    assert set(bench_cli.SELECTIONS) == set(registry.SELECTIONS)
    kernels = {case.group for case in registry.cases("kernels", False)}
    assert kernels == {"decode", "prefill", "cache", "statistics"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", "--device", "cpu"], "expected --quick on a CPU"),
        (["--quick", "--device", "tpu9"], "expected --device auto, cpu or cuda"),
        (["--quick", "--device", "meta"], "expected --device auto, cpu or cuda"),
        (["--quick", "--device", "cpu", "--only", "nothing"], "expected --only to name a case"),
        (["table", "absent"], "expected a results.json, got 'absent'"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and message in result.stderr


def test_readme_without_markers_is_left_alone(quick: tuple[Path, Result], tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("mine")
    result = call("table", quick[0], "--readme", readme)
    assert result.exit_code == 2 and "to have the lines" in result.stderr
    assert readme.read_text() == "mine"


@pytest.mark.parametrize("command", [[], ["prefill"], ["table"], ["plot"]])
def test_help_has_an_example(command: list[str]) -> None:
    result = call(*command, "-h")
    assert result.exit_code == 0 and "Example" in result.stdout


def test_plots_without_matplotlib(
    quick: tuple[Path, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What to install is said; the figures of a run do not depend on it."""
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ValueError, match=r"pip install 'sparsekv\[plot\]'"):
        plots.draw(results.read(quick[0]), tmp_path)
    run = ["cache", "--quick", "--device", "cpu", "--out", tmp_path, "--only", "append"]
    result = call(*run)
    assert result.exit_code == 0 and "plots not drawn: expected matplotlib" in result.stdout
    assert results.read(tmp_path).rows


# ---------------------------------------------------------------------- the runner


def made(name: str, ours: Any, peers: dict[str, Any], **kwargs: Any) -> Case:
    """A case of contenders that say their own figures."""
    return Case(name, "cache", {"n": 1}, lambda c: None, ours, peers, measure="samples", **kwargs)


def says(value: float, **extra: float) -> Callable[..., Any]:
    return lambda inputs, context: lambda: Round((value,), extra)


def raises(error: Exception) -> Callable[..., Any]:
    def factory(inputs: Any, context: Context) -> Any:
        raise error

    return factory


def run_all(cases: list[Case], out: Path, **kwargs: Any) -> list[results.Row]:
    context = Context(CPU, rounds=2)
    return Run(context, out, {}, **kwargs).all(cases, lambda name: None)


def test_statuses_and_reasons(tmp_path: Path) -> None:
    """A peer that cannot run, one that raises at once, one that raises in its second round."""
    calls: list[int] = []

    def late(inputs: Any, context: Context) -> Any:
        def run() -> float:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("late\nfault")
            return 1.0

        return run

    peers = {"a": raises(Missing("no a here")), "b": raises(KeyError("b")), "c": late}
    rows = run_all([made("x", says(2.0), peers | {"d": says(3.0)})], tmp_path)
    told = {row.contender: (row.status, row.reason) for row in rows}
    assert told == {
        "ours": ("measured", ""),
        "a": ("missing", "no a here"),
        "b": ("failed", "KeyError: 'b'"),
        "c": ("failed", "RuntimeError: late fault"),
        "d": ("measured", ""),
    }
    assert rows[-1].ratio == 1.5 and rows[0].samples == 2


def test_inputs_that_fail_fail_the_case(tmp_path: Path) -> None:
    case = Case("x", "cache", {}, raises(OSError("full")), says(1.0), {"p": says(1.0)})
    case = Case(**{**vars(case), "inputs": lambda context: 1 / 0})
    rows = run_all([case, made("y", says(1.0), {})], tmp_path)
    assert [row.status for row in rows] == ["failed", "failed", "measured"]
    assert rows[0].reason.startswith("ZeroDivisionError")


def test_out_of_time_is_a_row(tmp_path: Path) -> None:
    rows = run_all([made("x", says(1.0), {"p": says(1.0)})], tmp_path, seconds=-1.0)
    assert {(row.status, row.reason) for row in rows} == {("not run", "out of time")}
    assert len(results.read(tmp_path).rows) == 2


def test_rows_are_written_after_each_case(tmp_path: Path) -> None:
    """A run that is killed in its second case has the first on disk."""

    def killed(inputs: Any, context: Context) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all([made("x", says(1.0), {}), made("y", killed, {})], tmp_path)
    assert [row.what for row in results.read(tmp_path).rows] == ["x"]


def test_target_with_share_ratio_and_extra(tmp_path: Path) -> None:
    whole = made("whole", says(10.0), {})
    wanted = target("w", "share <= 0.3", "ratio.p >= 2", "peak <= 7", stretch="ratio.p >= 3")
    part = made("part", says(2.0, peak=7.0), {"p": says(5.0)}, target=wanted, versus="whole n=1")
    rows = run_all([whole, part], tmp_path)
    assert rows[1].met == "yes" and rows[1].extra["share"] == pytest.approx(0.2)
    longer = made("n", says(8.0), {"p": says(2.0)}, better="high", unit="tokens",
                  target=target("4x", "ratio.p >= 4"))  # fmt: skip
    assert run_all([longer], tmp_path)[0].met == "yes"


def test_flops_bytes_and_roof(tmp_path: Path) -> None:
    """1 ms for 2e9 FLOP is 2 TFLOP/s; the roof is what the case says bounds it."""
    case = made("x", says(1.0), {}, flops=2e9, bytes=4e9, roof="matmul")
    row = results.blank(case, "ours", results.MEASURED)
    results.fill(row, case, [Round((1.0, 1.0, 9.0))], {"matmul_tflops": 4.0, "copy_tbs": 8.0}, True)
    assert (row.value, row.low, row.high) == (1.0, 1.0, 9.0)
    assert row.tflops == pytest.approx(2) and row.tbs == pytest.approx(4)
    assert row.roof == pytest.approx(0.5)


def test_a_peer_faster_than_the_machine_has_failed() -> None:
    """Seen: a kernel that returned at once, at eleven times the bandwidth of the device."""
    case = made("x", says(1.0), {}, flops=2e9, roof="matmul")
    row = results.blank(case, "peer", results.MEASURED)
    results.fill(row, case, [Round((1.0,))], {"matmul_tflops": 0.2}, False)
    assert row.status == results.MEASURED  # the ceilings of a CPU are no ceilings
    results.fill(row, case, [Round((1.0,))], {"matmul_tflops": 0.2}, True)
    assert row.status == results.FAILED and row.value is None
    assert "1000%" in row.reason


# ---------------------------------------------------------------------- targets


def test_conditions() -> None:
    assert Condition.parse("tbs >= 3.4").holds({"tbs": 3.4}) is True
    assert Condition.parse("value <= 5.6").holds({"value": 5.7}) is False
    assert Condition.parse("value <= 5.6").holds({}) is None
    for text in ("value < 1", "value <=", "value <= many"):
        with pytest.raises(ValueError):
            Condition.parse(text)


def test_met_prefers_no_to_unknown() -> None:
    wanted = target("t", "a <= 1", "b >= 2", stretch="b >= 3")
    assert wanted.met({"a": 1, "b": 2}) == "yes"
    assert wanted.met({"a": 1, "b": 3}) == "stretch"
    assert wanted.met({"a": 2}) == "no"
    assert wanted.met({"a": 1}) == "unknown: no b"


def test_registry_has_the_targets_of_the_issue() -> None:
    """Every line of the targets table, in the full shapes; names are unique."""
    cases = registry.cases("all", False)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:  # a share must be of a case that runs before
        names = [c.name for c in cases]
        assert case.versus is None or names.index(case.versus) < names.index(case.name)
    judged: dict[str, list[Case]] = {}
    for case in cases:
        if case.target is not None:
            judged.setdefault(case.what, []).append(case)
    counts = {what: len(found) for what, found in judged.items()}
    assert counts["prefill attention"] == 6 and counts["paged decode"] == 8
    assert counts["paged decode with scores"] == 8 and counts["scores of all rows"] == 2
    assert counts["window scores"] == 8 and counts["time to first token"] == 2
    assert counts["time a token"] == 3 and counts["append one token"] == 2
    assert {"compact, half kept", "top-k", "KV after prefill"} <= set(counts)
    assert any(what.startswith("longest prompt in 24 GiB") for what in counts)
    assert counts[PEAK] == len([case for case in cases if case.what == PEAK])


# ---------------------------------------------------------------------- parts


def test_once_keeps_values_and_failures() -> None:
    context, calls = Context(CPU), []

    def fail() -> None:
        calls.append(1)
        raise Missing("never")

    for _ in range(2):
        with pytest.raises(Missing, match="never"):
            context.once("k", fail)
    assert len(calls) == 1
    assert context.once("v", lambda: 3) == context.once("v", lambda: 4) == 3


def test_wall_uses_all_calls() -> None:
    used: list[int] = []
    calls = [lambda: used.append(0), lambda: used.append(1)]
    assert len(timing.wall(calls).values) == 3 and set(used) == {0, 1}


@pytest.mark.parametrize("most", range(6))
def test_longest_by_bisection(most: int) -> None:
    lengths = (10, 20, 30, 40, 50)
    tried: list[int] = []

    def fits(length: int) -> bool:
        tried.append(length)
        return length <= 10 * most

    assert longest(lengths, fits) == 10 * most
    assert len(tried) <= 3


def test_ragged_lengths_keep_the_mean() -> None:
    """Otherwise the bytes of a ragged case would be those of another."""
    x = paged(Context(CPU, tiny=True), 2, 128, 0.25, ragged=True)
    assert x.lens.float().mean() == 32 and x.lens.max() > 32
    assert sorted(x.table.flatten().tolist()) == list(range(1, x.table.numel() + 1))


def test_later_results_win_where_they_measured() -> None:
    case = made("x", says(1.0), {})

    def result(status: str, value: float | None) -> results.Results:
        row = results.blank(case, "ours", status, "why")
        row.value = value
        return results.Results({"commit": "c"}, {}, [row])

    old, new, cut = result("measured", 1.5), result("measured", 2.5), result("not run", None)
    assert "2.5 ms" in table.tables([old, new, cut])


def test_workers_import_nothing_of_ours() -> None:
    """They run in an interpreter that may not have sparsekv."""
    folder = Path(registry.__file__).parent / "workers"
    for file in folder.glob("*.py"):
        assert "import sparsekv" not in file.read_text() and "from sparsekv" not in file.read_text()


def test_worker_output_and_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The last JSON line counts; a process that fails is a failed row with its last words."""
    from sparsekv.bench import model_peers

    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("print('noise'); print('{\"a\": 1.5}'); print('bye')")
    bad.write_text("raise SystemExit('no GPU memory')")
    context = Context(CPU, tiny=True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert model_peers._work(context, [sys.executable, str(good)]) == {"a": 1.5}
    with pytest.raises(RuntimeError, match=r"bad.py ended with 1: no GPU memory"):
        model_peers._work(context, [sys.executable, str(bad)])
    factory = model_peers.figure(lambda context: {"a": 1.5}, "b")
    with pytest.raises(Missing, match="did not measure 'b'"):
        factory(None, context)
