"""The serving benchmark without vLLM: a stand-in for its process, then files, plots, mistakes."""

from __future__ import annotations

import csv
import importlib
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import serve_worker
from typer.testing import CliRunner, Result

from sparsekv import cli
from sparsekv.bench import plots, results, table
from sparsekv.bench.results import Row
from sparsekv.bench.serve import cli as serve_cli
from sparsekv.bench.serve import processes, targets
from sparsekv.bench.serve.options import Choice
from sparsekv.bench.serve.plan import Mode, engine_arguments, modes, write_shape
from sparsekv.bench.serve.record import Record, row_of
from sparsekv.bench.serve.run import Run, Settings, log_name
from sparsekv.bench.serve.workload import Workload

WORKER = str(Path(serve_worker.__file__))
SHORT = ("--lengths", "40/5", "--concurrency", "1,4", "--kv-gib", "0.5", "--commit", "abc123")
Plans = Callable[[], list[dict[str, Any]]]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli.APP, ["bench", "serve", *(str(a) for a in arguments)])


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plans:
    """Every process is the stand-in, no plots; returns what the processes so far were asked."""
    notes = tmp_path / "notes"
    real = processes.Interpreter.command

    def command(self: processes.Interpreter, plugins: bool, offline: bool) -> list[str]:
        return [*real(self, plugins, offline)[:-2], WORKER, str(notes)]

    def llm_kwargs(model: str, *, policy: str, budget: int, **more: Any) -> dict[str, Any]:
        own = {} if policy == "full" else {"block_size": 32, "additional_config": more}
        return {"model": model, **own}

    fake = types.ModuleType("sparsekv.vllm")
    fake.llm_kwargs = llm_kwargs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sparsekv.vllm", fake)
    monkeypatch.setattr(processes.Interpreter, "command", command)
    monkeypatch.setattr(serve_cli, "find_spec", lambda name: name)
    monkeypatch.setattr(plots, "draw", lambda found, out: [])
    return lambda: list(map(json.loads, notes.read_text().splitlines())) if notes.exists() else []


# ---------------------------------------------------------------------- the whole run


def test_a_run_and_its_files(plans: Plans, tmp_path: Path) -> None:
    """Two modes in two KV sizes are four processes; every workload of each is a row."""
    out = tmp_path / "out"
    run = call("--shape", "tiny", *SHORT, "--kv-gib", "0.5,unlimited", "--rates", "2", "--out", out)
    assert run.exit_code == 0, run.output
    found = results.read(out)
    assert len(found.rows) == 2 * 2 * 3 and len(plans()) == 4
    assert {row.status for row in found.rows} == {"measured"}
    assert {row.contender for row in found.rows} == {"dense", "layersplit 1024"}
    assert (found.machine["device"], found.machine["vllm"]) == ("abacus", "0.0")
    assert found.machine["settings"]["model"] == "tiny" and found.machine["commit"] == "abc123"
    name = "closed loop in=40 out=5 concurrency=4 requests=12 kv_gib=0.5"
    assert f"{name} | layersplit 1024 | 800 tok/s | 2.00× dense | TTFT p50 100 ms" in run.stdout
    sparse = {row.case: row for row in found.rows if row.contender != "dense"}
    assert sparse[name].value == 800 and sparse[name].extra["times_dense"] == 2
    assert "9 blocks of 16 tokens" in sparse[name].about and "abc123" in sparse[name].about
    with (out / "serve.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert (
        len(lines) == 12 and lines[0]["contender"] == "dense" and lines[0]["out_tok_s"] == "100.0"
    )
    assert [line["kv_gib"] for line in lines] == ["0.5"] * 6 + ["unlimited"] * 6
    assert lines[-1]["rate"] == "2" and lines[-1]["concurrency"] == ""
    assert (out / "layersplit-1024-unlimited.log").exists()


def test_what_the_engines_are_told(plans: Plans, tmp_path: Path) -> None:
    """Equal for both but for what the policy needs; the dense one sees no plugin."""
    more = ["--modes", "dense,full,snapkv", "--sparse", '{"full_layers": 4}', "--seed", "3"]
    engine = ["--engine", '{"max_num_batched_tokens": 64}', "--budget", "256"]
    run = call("--shape", "tiny", *SHORT, *more, *engine, "--out", tmp_path / "out")
    assert run.exit_code == 0, run.output
    dense, full, snapkv = plans()
    shared = {
        "max_model_len": 45, "max_num_seqs": 4, "enable_prefix_caching": False, "seed": 3,
        "skip_tokenizer_init": True, "kv_cache_memory_bytes": 2**29, "load_format": "dummy",
        "dtype": "bfloat16", "max_num_batched_tokens": 64,
    }  # fmt: skip
    assert shared.items() <= dense["engine"].items()
    assert dense["engine"] == full["engine"]
    own = {"block_size": 32, "additional_config": {"full_layers": 4}}
    assert snapkv["engine"] == dense["engine"] | own
    assert [plan["sparse"] for plan in (dense, full, snapkv)] == [False, True, True]
    assert dense["flags"] == {"VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1"}
    assert full["flags"] == {"VLLM_PLUGINS": None, "HF_HUB_OFFLINE": "1"}
    assert dense["workloads"] == snapkv["workloads"] and dense["seed"] == 3
    labels = {row.contender for row in results.read(tmp_path / "out").rows}
    assert labels == {"dense", "full", "snapkv 256 full_layers=4"}


# ---------------------------------------------------------------------- time, death, resume


def test_a_killed_run_keeps_its_rows_and_is_resumed(
    plans: Plans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after its third row; the next run asks for the fourth alone, and another for none."""
    told: list[Row] = []
    real = serve_cli._tell

    def tell(row: Row) -> None:
        told.append(row)
        real(row)
        if len(told) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(serve_cli, "_tell", tell)
    arguments = ["--shape", "tiny", *SHORT, "--out", tmp_path]
    assert call(*arguments).exit_code == 130
    assert len(results.read(tmp_path).rows) == 3
    again = call(*arguments, "--resume")
    assert again.exit_code == 0 and len(results.read(tmp_path).rows) == 4
    assert [len(plan["workloads"]) for plan in plans()] == [2, 2, 1]
    assert plans()[-1]["workloads"][0]["concurrency"] == 4 and plans()[-1]["sparse"]
    assert call(*arguments, "--resume").exit_code == 0 and len(plans()) == 3
    more = call(*arguments, "--resume", "--concurrency", "1,2")  # rows of other cases stay
    assert more.exit_code == 0 and len(results.read(tmp_path).rows) == 6
    other = call(*arguments, "--resume", "--seed", "1")
    assert other.exit_code == 2 and "expected --resume with the settings" in other.stderr
    assert len(plans()) == 5
    assert call(*arguments).exit_code == 0 and len(results.read(tmp_path).rows) == 4  # anew


def test_another_device_is_refused(plans: Plans, tmp_path: Path) -> None:
    arguments = ["--shape", "tiny", *SHORT, "--out", tmp_path, "--resume"]
    assert call(*arguments, "--modes", "dense").exit_code == 0
    file = tmp_path / "results.json"
    file.write_text(file.read_text().replace("abacus", "quipu"))
    mixed = call(*arguments)
    assert mixed.exit_code == 2 and "expected --resume on quipu, got abacus" in mixed.stderr


def test_modes_share_the_time(plans: Plans, tmp_path: Path) -> None:
    """Of 100 s the first of four modes may begin workloads for 25; without time, none begins."""
    kv = ["--kv-gib", "0.5,1"]
    assert (
        call("--shape", "tiny", *SHORT, *kv, "--seconds", "100", "--out", tmp_path).exit_code == 0
    )
    ends = [plan["deadline"] for plan in plans()]
    # What the first does not use is there for the others: 25, 33, 50 and 100 s, less what has gone.
    assert [end - ends[0] for end in ends] == pytest.approx([0, 8, 25, 75], abs=4)
    late = call("--shape", "tiny", *SHORT, "--seconds", "0", "--out", tmp_path / "late")
    assert late.exit_code == 0 and "| dense | not run | out of time" in late.stdout
    assert len(plans()) == 4 and len(results.read(tmp_path / "late").rows) == 4


def test_a_process_that_dies(plans: Plans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had reported stays; the rest has failed, with the error that the log names."""
    command = processes.Interpreter.command
    monkeypatch.setattr(
        processes.Interpreter, "command", lambda self, **kw: [*command(self, **kw), "die"]
    )
    run = call("--shape", "tiny", *SHORT, "--out", tmp_path)
    assert run.exit_code == 0, run.output
    rows = results.read(tmp_path).rows
    assert [row.status for row in rows] == ["measured", "failed"] * 2
    assert rows[1].reason == "the worker ended with 3: ValueError: no room for it"
    assert call("--shape", "tiny", *SHORT, "--out", tmp_path, "--resume").exit_code == 0
    assert [len(plan["workloads"]) for plan in plans()] == [2, 2, 1, 1]  # only what had failed


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    """One that hangs is ended, its whole group, when nobody follows it any more."""
    work = [Workload(8, 4, 1, concurrency=1)] * 2
    plan = {"sparse": False, "workloads": [one.plain() for one in work]}
    command = [sys.executable, WORKER, str(tmp_path / "notes"), "hang"]
    events = processes.follow(command, plan, tmp_path, tmp_path / "log")
    pid = next(events)["ready"]["pid"]
    assert next(events)["workload"] == 0
    os.kill(pid, 0)
    events.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", "no output"),
        ("a\nit is over\n", "it is over"),
        ("x\n(EngineCore pid=1) ValueError: no GPU\nRuntimeError: Engine core initialization "
         "failed.\nbye", "ValueError: no GPU"),
        ("x torch.OutOfMemoryError: no memory", "torch.OutOfMemoryError: no memory"),
        ("RuntimeError: Engine core initialization failed. See",
         "RuntimeError: Engine core initialization failed. See"),
    ],
)  # fmt: skip
def test_last_words(log: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log)
    assert processes.last_words(tmp_path / "log") == words


def test_the_command_of_a_process() -> None:
    """This package and the folder of vLLM come first; a CPU has flags of its own."""
    command = processes.Interpreter("/site", on_gpu=False).command(plugins=True, offline=False)
    path = next(word for word in command if word.startswith("PYTHONPATH="))
    root = Path(cli.__file__).parents[1]
    assert path.startswith(f"PYTHONPATH={root}:/site:")
    assert "VLLM_CPU_OMP_THREADS_BIND=nobind" in command and "VLLM_PLUGINS=" not in command
    assert command[-3:] == [sys.executable, "-m", "sparsekv.bench.serve.worker"]
    on_gpu = processes.Interpreter().command(plugins=False, offline=True)
    assert {"VLLM_PLUGINS=", "HF_HUB_OFFLINE=1"} <= set(on_gpu)
    assert not any(word.startswith("VLLM_CPU") for word in on_gpu)


def test_policies_ask_the_vllm_of_another_folder(
    plans: Plans, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`sparsekv.vllm.llm_kwargs` imports vLLM, which need not be installed beside this."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "elsewhere.py").write_text("BLOCK = 64\n")

    def llm_kwargs(model: str, **settings: Any) -> dict[str, Any]:
        return {"model": model, "block_size": importlib.import_module("elsewhere").BLOCK}

    monkeypatch.setattr(sys.modules["sparsekv.vllm"], "llm_kwargs", llm_kwargs)
    monkeypatch.delitem(sys.modules, "elsewhere", raising=False)
    before = list(sys.path)
    given = ("--shape", "tiny", "--modes", "layersplit", "--vllm-site", tmp_path / "site")
    assert call(*SHORT, *given, "--out", tmp_path / "out").exit_code == 0
    assert [plan["engine"]["block_size"] for plan in plans()] == [64]
    assert sys.path == before


# ---------------------------------------------------------------------- tables and targets


def row(contender: str, value: float | None, status: str = "measured", **extra: float) -> Row:
    mode = Mode(contender, 6, {})
    figures = extra if value is None else {"out_tok_s": value, **extra}
    report = {"status": status, "reason": "" if status == "measured" else "why", "figures": figures}
    return row_of(mode, Workload(4000, 500, 120, concurrency=40), report, "")


def test_the_table_has_ratios(tmp_path: Path) -> None:
    """Modes measured apart stand beside each other; what failed has its reason below."""
    first = [row("snapkv 1024", 300.0, ttft_p50_ms=500.0), row("h2o 1024", None, "failed")]
    second = [row("dense", 150.0, ttft_p50_ms=2000.0), row("snapkv 1024", None, "not run")]
    text = table.tables([results.Results({"commit": "c"}, {}, rows) for rows in (first, second)])
    assert "### serve: closed loop" in text and "ceilings" not in text
    lines = [line for line in text.splitlines() if line.startswith("| 4000 | 500 | 40 | 120 | 6 |")]
    assert [line.split(" | ")[5] for line in lines] == ["dense", "snapkv 1024", "h2o 1024"]
    assert "| dense | 150 |" in lines[0] and "| snapkv 1024 | 300 (2.00×) |" in lines[1]
    assert "500 (0.25×)" in lines[1] and "failed" in lines[2]
    assert len({line.count("|") for line in text.splitlines() if line.startswith("| ")}) == 1
    assert "- h2o 1024: failed in 1 case: why" in text


@pytest.mark.parametrize(
    ("value", "status", "met"), [(2000.0, "measured", "yes"), (1999.0, "measured", "no"),
                                 (None, "failed", "unknown: failed")],
)  # fmt: skip
def test_targets_of_the_issue(value: float | None, status: str, met: str, tmp_path: Path) -> None:
    settings = {"model": "llama-8b"}
    machine = {"device": "NVIDIA H200", "settings": settings}
    record = Record(tmp_path, machine, [row("dense", 1000.0)])
    found = record.put(row("layersplit 1024", value, status))
    assert (found.target, found.met) == ("≥ 2.0× dense out tok/s", met)
    assert record.put(row("full", 995.0)).met == "yes"
    assert not record.rows[0].target
    other = Record(tmp_path, machine | {"device": "cpu"}, [row("dense", 1000.0)])
    assert other.put(row("layersplit 1024", 3000.0)).met == ""


def test_targets_by_shape() -> None:
    def at(prompt: int, concurrency: int, kv: float, **extra: float) -> Row:
        report = {"status": "measured", "reason": "", "figures": {"out_tok_s": 1.0, **extra}}
        load = Workload(prompt, 500, concurrency, concurrency=concurrency)
        return row_of(Mode("snapkv 1024", kv, {}), load, report, "")

    rows = [
        at(4000, 20, 6, ttft_p50_ms=999.0), at(4000, 64, 80, step_p50_ms=8.2),
        at(32000, 8, 80, step_p50_ms=6.3), at(4000, 40, 6), at(4000, 10, 6),
    ]  # fmt: skip
    targets.compare(rows, judged=True)
    assert [r.met for r in rows] == ["yes", "no", "yes", "unknown: no times_dense", ""]


def test_plots(tmp_path: Path) -> None:
    """Throughput and TTFT by load, one set a length and KV memory, through `bench plot`."""
    rows = [row("dense", 150.0, ttft_p50_ms=5.0), row("snapkv 1024", 300.0, ttft_p99_ms=7.0)]
    results.write(tmp_path, {}, {}, [*rows, row("h2o 1024", None, "failed")])
    done = CliRunner().invoke(cli.APP, ["bench", "plot", str(tmp_path), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    names = {path.name for path in tmp_path.glob("*.png")}
    ends = ("throughput", "ttft", "ttft_p99")
    assert names == {f"serve_concurrency_{end}_4000_500_6.png" for end in ends}
    assert all((tmp_path / name).read_bytes()[1:4] == b"PNG" for name in names)


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected --model or --shape (or --base-url), got neither"),
        (["--model", "x", "--shape", "tiny"], "got both"),
        (["--shape", "tiny"], "expected vLLM (pip install 'sparsekv[vllm]'), --vllm-site or"),
        (["--shape", "huge", "--vllm-site", "x"], "expected --shape to be one of llama-8b, tiny"),
        (["--lengths", "4000"], "expected --lengths like 4000/500,32000/500@8, got '4000'"),
        (["--lengths", "a/b"], "expected --lengths like"),
        (["--concurrency", "1,x"], "expected --concurrency to be numbers like 1,2,4, got '1,x'"),
        (["--concurrency", "0"], "expected a concurrency >= 1, got 0"),
        (["--concurrency", ""], "expected --concurrency or --rates, got neither"),
        (["--rates", "nan"], "expected a rate of arrivals > 0"),
        (["--rates", "2", "--lengths", "4/5@1"], "expected a length without @ for --rates 2"),
        (["--lengths", "4/5@0"], "expected a concurrency >= 1, got 0"),
        (["--rounds", "0"], "expected requests >= 1, got 0"),
        (["--kv-gib", "-1"], "expected --kv-gib like 6,unlimited, got '-1'"),
        (["--kv-gib", ""], "expected --kv-gib like 6,unlimited"),
        (["--kv-gib", "much"], "expected --kv-gib to be numbers"),
        (["--engine", "[1]"], "expected --engine to be a JSON object, got '[1]'"),
        (["--engine", "{", "--shape", "tiny"], "expected --engine to be a JSON object"),
        (["--sparse", "x"], "expected --sparse to be a JSON object"),
        (["--engine", '{"seed": 1}'], "expected --engine without seed"),
        (["--sparse", '{"policy": "h2o"}'], "expected --sparse without policy"),
        (["--modes", ","], "expected --modes like dense,layersplit, got none"),
        (["--warmup", "-1"], "expected --warmup >= 0, got -1"),
        (["--timeout", "0"], "expected --timeout > 0 s, got 0"),
        (["--base-url", "localhost:8000"], "expected --base-url to start with http"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = call(*arguments, "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert not (tmp_path / "out").exists()


def test_help_has_an_example() -> None:
    result = call("-h")
    assert result.exit_code == 0 and "--shape llama-8b --kv-gib 6" in result.stdout


def test_a_policy_sets_its_own_arguments(plans: Plans) -> None:
    choice = Choice(["snapkv"], [None], 1024, {}, {"block_size": 16})
    with pytest.raises(ValueError, match="expected --engine to leave block_size to snapkv"):
        modes("m", choice, choice.engine)
    (mode,) = modes("m", Choice(["snapkv"], [None], 1024, {}, {}), {"block_size": 32})
    assert mode.engine["block_size"] == 32 and mode.sparse
    assert log_name(mode) == "snapkv-1024-unlimited"


def test_engines_hold_what_the_workloads_need() -> None:
    workloads = [Workload(100, 20, 5, concurrency=7), Workload(50, 90, 500, rate=1.0)]
    found = engine_arguments(workloads, None, on_gpu=True, seed=0)
    assert found["max_model_len"] == 140 and found["max_num_seqs"] == 256
    assert "enforce_eager" not in found and "load_format" not in found
    assert engine_arguments(workloads[:1], None, on_gpu=False, seed=0)["enforce_eager"]


def test_shapes_are_configs(tmp_path: Path) -> None:
    write_shape("llama-8b", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == 32 and config["num_key_value_heads"] == 8
    assert config["architectures"] == ["LlamaForCausalLM"] and config["hidden_size"] == 4096


def test_settings_of_a_run_are_checked(tmp_path: Path) -> None:
    run = Run(Record(tmp_path, {"commit": "c", "settings": {}}), Settings(seconds=5.0), print)
    assert 4 < run._left() <= 5
