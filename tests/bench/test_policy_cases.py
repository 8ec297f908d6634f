"""The run of all policies: how each is set up, when the clock is read, what the table says."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import sparsekv
import sparsekv.bench.llama
from sparsekv.bench import policy_cases, results, statistic_memory_cases
from sparsekv.bench.case import Case, Context, Round
from sparsekv.bench.llama import (
    generate,
    llama,
    llama_config,
    model_shape,
    patched,
    prompt,
    shallow_twin,
    twin,
)
from sparsekv.bench.policy_settings import WordTokenizer, compression_interval, setting
from sparsekv.bench.policy_table import policy_table
from sparsekv.bench.runner import Run
from sparsekv.bench.whole import measured
from sparsekv.kernels._quant import KV_FORMATS
from sparsekv.policies import POLICIES

CPU = torch.device("cpu")
SHAPE = model_shape(False)
TOKENS, BUDGET = 32000, 1024


@pytest.fixture(scope="module")
def context() -> Context:
    return Context(CPU, tiny=True, rounds=1)


# ---------------------------------------------------------------------- settings


def test_the_model_of_the_issue() -> None:
    """Llama-3-8B, 32000 tokens, budget 1024; all policies, `full` first."""
    assert vars(SHAPE) == {
        "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
    }  # fmt: skip
    cases = policy_cases.policy_cases(False)
    assert sorted(str(case.shape["policy"]) for case in cases) == sorted(POLICIES)
    assert cases[0].name == "every policy policy=full B=1 S=32000"
    assert {case.versus for case in cases[1:]} == {cases[0].name}
    assert "budget 1024" in cases[0].about


@pytest.mark.filterwarnings("error")
def test_tiny_shapes_do_not_warn() -> None:
    """`sparsekv bench --quick --device cpu` began with warnings of plans that nobody asked for."""
    assert len(policy_cases.policy_cases(True)) == len(POLICIES)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_ready(name: str) -> None:
    chosen = setting(name, SHAPE, TOKENS, BUDGET)
    chosen.policy.ready()
    chosen.policy.fits(SHAPE)
    assert len(chosen.policy.plan(SHAPE, TOKENS, chosen.budget)) == SHAPE.num_layers
    assert f"budget {chosen.budget}" in chosen.about
    assert "gates (" not in chosen.about and "object at" not in chosen.about
    assert (chosen.budget == BUDGET) == (name != "pyramidinfer")


def test_the_smallest_budget_is_the_smallest() -> None:
    chosen = setting("pyramidinfer", SHAPE, TOKENS, BUDGET)
    assert chosen.budget > BUDGET and "the smallest that it allows" in chosen.about
    with pytest.raises(ValueError, match=f"at least {chosen.budget} tokens"):
        chosen.policy.plan(SHAPE, TOKENS, chosen.budget - 1)


def test_stand_ins() -> None:
    """Half of the heads are retrieval heads, in each layer; ids are below any vocabulary."""
    duo: Any = setting("duo", SHAPE, TOKENS, BUDGET).policy
    assert {sum(layer) for layer in duo.retrieval_heads()} == {SHAPE.num_kv_heads // 2}
    planned: Any = setting("planned", SHAPE, TOKENS, BUDGET).policy
    assert planned.shares[0] == tuple(range(32, 257, 32)) and planned.shares[31] == tuple(
        range(1, 9)
    )
    kvzip: Any = setting("kvzip", SHAPE, TOKENS, BUDGET).policy
    passes = kvzip.repeats(range(2, 102))
    assert [(one.start, one.stop) for one in passes] == [(4, 100)]
    ids = WordTokenizer()("to repeat it")["input_ids"]
    assert ids == [4, 8, 4] and max(passes[0].ids) < llama_config(True).vocab_size


def test_intervals() -> None:
    found = {}
    for name in POLICIES:
        chosen = setting(name, SHAPE, TOKENS, BUDGET)
        found[name] = compression_interval(chosen.policy, SHAPE, TOKENS, chosen.budget)
    assert {name: n for name, n in found.items() if n} == {
        "keydiff": 128, "rkv": 128, "scissorhands": 512,
    }  # fmt: skip


@pytest.mark.parametrize("interval", [None, 1, 20, 128, 150, 151, 512])
def test_timed_steps_hold_one_compression_or_none(interval: int | None) -> None:
    """A cache that holds `low` after the prompt compresses at steps interval, 2 interval, ..."""
    first, begin, end = policy_cases.step_marks(interval)
    assert first == 1 and begin >= 5  # the capture is behind
    if interval is None or interval > 150:
        assert (begin, end) == (5, 37)
        return
    cuts = [step for step in range(1, 2000) if step % interval == 0]
    # A mark at n tokens is read when n - 1 steps have run.
    assert sum(begin - 1 < step <= end - 1 for step in cuts) == 1 and end - begin == interval
    assert any(step <= begin - 1 for step in cuts)


# ---------------------------------------------------------------------- one generation


def test_shallow_twin_shares_weights(context: Context) -> None:
    whole = llama(context)
    layers = len(whole.model.layers)
    first = shallow_twin(context)
    assert first is shallow_twin(context) and first is not whole
    assert first.lm_head.weight is whole.lm_head.weight
    assert len(first.model.layers) == first.config.num_hidden_layers <= 4
    assert len(whole.model.layers) == whole.config.num_hidden_layers == layers
    assert model_shape(True, first).num_layers == len(first.model.layers)


def test_shallow_twin_of_a_deeper_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers that are left run, under a policy that plans for as many."""
    monkeypatch.setitem(vars(sparsekv.bench.llama)["_TINY"], "num_hidden_layers", 6)
    context = Context(CPU, tiny=True)
    model = shallow_twin(context)
    assert len(model.model.layers) == 4 and len(llama(context).model.layers) == 6
    for name in ("duo", "pyramidinfer"):
        chosen = setting(name, model_shape(True, model), 96, 24)
        sparsekv.patch(model, chosen.policy, chosen.budget)
        generate(model, prompt(context, 1, 96), (3,))


def test_figures_of_a_generation(context: Context) -> None:
    ids = prompt(context, 1, 96)
    dense = measured(twin(context, "hf_dynamic"), ids, (1, 3, 5))
    ours = measured(patched(context, {}, "h2o", 24), ids, (1, 3, 5))
    assert len(dense.token_ms) == 2 and dense.ttft_ms > 0 and dense.peak_mib is None
    # 2 layers, 2 KV heads of 16 numbers in fp32, K and V; the last token is not fed.
    assert dense.kv_mib * 2**20 == 2 * 2 * 2 * 16 * 4 * 100 and dense.kept == 100
    assert ours.kept == 24 and ours.kv_mib < dense.kv_mib
    assert ours.figures().keys() == {"kv_mib", "kept", "warnings"}


def test_our_warnings_are_counted(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(*args: Any, **kwargs: Any) -> Any:
        warnings.warn("sparsekv decodes without a CUDA graph: why", stacklevel=1)
        warnings.warn("of another library", stacklevel=1)
        return generate(*args, **kwargs)

    monkeypatch.setattr("sparsekv.bench.whole.generate", warned)
    found = measured(patched(context, {}, "full", 24), prompt(context, 1, 48), (1, 3, 5))
    assert found.warnings == ("sparsekv decodes without a CUDA graph: why",)
    assert found.figures()["warnings"] == 1
    note = policy_cases._as_round(found, "no cut").note
    assert note == "no cut; 1 warning: sparsekv decodes without a CUDA graph: why"


# ---------------------------------------------------------------------- the whole run


def test_a_policy_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on; dense is measured once; the table names the reason."""
    real, calls = policy_cases.measured, []

    def counted(model: Any, *args: Any) -> Any:
        calls.append(model)
        if getattr(model, "_sparsekv_patch", None) and model._sparsekv_patch.policy.name == "tova":
            raise RuntimeError("out of | luck")
        return real(model, *args)

    monkeypatch.setattr(policy_cases, "measured", counted)
    context = Context(CPU, tiny=True, rounds=1)
    wanted = ("full", "tova", "pyramidinfer")
    cases = [c for c in policy_cases.policy_cases(True) if c.shape["policy"] in wanted]
    rows = Run(context, tmp_path, {}).all(cases, lambda name: None)
    assert len(calls) == 4
    ours = {row.shape["policy"]: row for row in rows if row.contender == "ours"}
    assert ours["tova"].status == "failed" and ours["tova"].reason == "RuntimeError: out of | luck"
    full, pruned = ours["full"], ours["pyramidinfer"]
    assert full.value and pruned.value
    assert pruned.extra["share"] == pytest.approx(pruned.value / full.value)
    read = results.read(tmp_path).rows
    lines = policy_table(_by_case(read)).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| dense", "| full", "| tova", "| pyramidinfer",
    ]  # fmt: skip
    assert r"budget 24; failed: RuntimeError: out of \| luck | failed |" in lines[4]
    assert "the smallest that it allows" in lines[5]


def _by_case(rows: list[results.Row]) -> list[list[results.Row]]:
    found: dict[str, list[results.Row]] = {}
    for row in rows:
        found.setdefault(row.case, []).append(row)
    return list(found.values())


def test_the_table_of_policies(tmp_path: Path) -> None:
    """Ratio to dense: twice the time is 2.00."""

    def says(value: float, note: str = "", **extra: float) -> Any:
        return lambda inputs, context: lambda: Round((value,), extra, note)

    figures = {"token_ms": 7.125, "kv_mib": 128.04, "kept": 1056.0, "peak_mib": 900.4}
    case = Case(
        "every policy", "policies", {"policy": "x", "B": 1, "S": 9}, lambda c: None,
        says(3000.0, "no cut", **figures), {"hf_dynamic": says(1500.0, token_ms=20.0)},
        measure="samples", about="budget 4",
    )  # fmt: skip
    rows = Run(Context(CPU), tmp_path, {}).all([case], lambda name: None)
    assert policy_table([rows]).splitlines()[2:] == [
        "| dense | transformers' cache | 1500.0 | 1.00 | 20.00 |  |  |  |",
        "| x | budget 4; no cut | 3000.0 | 2.00 | 7.12 | 128.0 | 1056 | 900 |",
    ]


# ---------------------------------------------------------------------- statistics


def test_every_statistic_that_a_policy_asks_for_is_measured() -> None:
    kinds = {type(feature) for feature in statistic_memory_cases._FEATURES.values()}
    needs = statistic_memory_cases._NEEDS.values()
    measured_kinds = {(n.statistic, n.rows is None, n.noise is None) for n in needs}
    for name in POLICIES:
        policy = setting(name, SHAPE, TOKENS, BUDGET).policy
        for layer in range(SHAPE.num_layers):
            assert {type(feature) for feature in policy.features(layer, "prefill")} <= kinds, name
            need = policy.needs(layer, "prefill")
            if need is not None:
                kind = (need.statistic, need.rows is None, need.noise is None)
                assert kind in measured_kinds, name


def test_peak_without_a_gpu_is_missing(context: Context, tmp_path: Path) -> None:
    """Each is computed before it says so."""
    cases = statistic_memory_cases.statistic_memory_cases(True)
    rows = Run(context, tmp_path, {}).all(cases, lambda name: None)
    assert {(row.status, row.reason) for row in rows} == {
        ("missing", "the record of the allocator needs a CUDA device")
    }


# ---------------------------------------------------------------------- gpu_check.py


@pytest.fixture(scope="module")
def gpu_check() -> Iterator[ModuleType]:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


def test_the_workload_of_the_sanitizer_runs(
    gpu_check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every policy and every format, in each way that it allows."""
    gpu_check.small(tmp_path, "cpu")
    done = capsys.readouterr().out.splitlines()
    expected = [f"{name} : done" for name in POLICIES]
    assert done == expected + [f"h2o {form}: done" for form in KV_FORMATS]
    assert [*gpu_check.ways(gpu_check.small_policy("pyramidinfer"))] == [{}]
    assert len([*gpu_check.ways(gpu_check.small_policy("kvzip"))]) == 3
