"""Plans: curves against softmax matrices, allocation against every other split, files that load."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from eager import record
from families import build
from hypothesis import given
from hypothesis import strategies as st
from rig import Loop, prompt, tiny_llama
from tiny import save_tiny_model
from typer.testing import CliRunner

import sparsekv
from sparsekv import cli
from sparsekv.diagnose import make_plan
from sparsekv.diagnose.allocate import best_counts, falling, lost
from sparsekv.diagnose.curves import Curves, _grid, loss_curves
from sparsekv.diagnose.planning import compare, split, write_plan
from sparsekv.policies import Planned, SnapKV

SCORER = SnapKV(window=4, kernel=3)


# ------------------------------------------------------------------ curves


def kept_by_policy(model, scorer, ids, budget):
    """What SnapKV keeps of a prompt: positions by full-attention layer and KV head."""
    loop = Loop(sparsekv.patch(model, scorer, budget))
    loop.feed(ids)
    kept = [loop.kept()[i] for i in loop.cache.state.ordinal]
    sparsekv.unpatch(model)
    return kept


def missed(layer, head, kept, tokens):
    """Mean mass of later rows on the keys of a prompt that a KV head does not keep."""
    later = layer.by_kv_head(layer.p[:, tokens:, :tokens].mean(1))[head]
    return float(later.sum() - later[kept].sum())


def error(layer, head, kept, tokens):
    """Squared errors behind the output projection, from masked and renormalised rows, each as a
    share of the residual stream behind the layer."""
    group, width = len(layer.p) // layer.kv_heads, layer.v.shape[-1]
    own = slice(head * group, (head + 1) * group)
    p, sink = layer.p[own, tokens:], layer.sink[own, tokens:]
    seen = torch.zeros(p.shape[-1], dtype=torch.float64)
    seen[kept], seen[tokens:] = 1.0, 1.0
    fewer = p * seen
    fewer = fewer / (fewer.sum(-1) + sink)[..., None]
    moved = ((fewer - p) @ layer.v[head]).transpose(0, 1).flatten(1)  # [F, G D]
    first = head * group * width
    added = moved @ layer.w_o[:, first : first + group * width].T
    stream = layer.stream[0][tokens:]
    return float((added.square().sum(-1) / stream.square().sum(-1)).sum())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("measure", ["error", "mass"])
def test_curves_are_what_the_policy_loses(family, measure):
    """At every count: what later rows lose with the very keys that SnapKV keeps of the prompt."""
    model, ids, later, tokens = build(family), prompt(46, 2), 9, 37
    pool = "max" if measure == "mass" else "none"
    scorer = SnapKV(window=4, kernel=3, pool=pool)
    curves = loss_curves(model, [ids], scorer=scorer, later=later, measure=measure, page=6)
    assert curves.slots.tolist() == [4, 10, 16, 22, 28, 34, 37] and curves.tokens == tokens
    layers = [layer for layer in record(model, ids) if layer.window is None]
    truth = np.zeros((len(layers), 2, 7))
    for point, budget in enumerate(curves.slots.tolist()):
        kept = kept_by_policy(model, scorer, ids[:, :tokens], budget)
        for i, head in itertools.product(range(len(layers)), range(2)):
            loss = {"error": error, "mass": missed}[measure]
            truth[i, head, point] = loss(layers[i], head, kept[i][head], tokens)
    whole = truth[..., 0].sum() if measure == "error" else 2 * len(layers)
    np.testing.assert_allclose(curves.loss[0], truth / whole, atol=2e-5, rtol=2e-3)
    assert curves.loss[0, ..., -1] == pytest.approx(0, abs=1e-6)


def test_errors_of_many_texts_weigh_the_same():
    """Each is a share of its own worst, however large its numbers are; no hook stays."""
    model = tiny_llama()
    curves = loss_curves(model, [prompt(40, i) for i in range(3)], scorer=SCORER, later=9)
    assert curves.loss[..., 0].sum((1, 2)) == pytest.approx(1.0)
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_the_grid_is_fine_where_little_is_kept():
    counts = _grid(32, 2048, 16)
    assert counts[:7].tolist() == [32, 48, 64, 80, 96, 112, 128] and counts[-1] == 2048
    steps = np.diff(counts)
    assert (steps[:-1] % 16 == 0).all() and (steps <= np.maximum(16, counts[:-1] / 4)).all()
    assert len(counts) < 30 and _grid(4, 5, 16).tolist() == [4, 5]


def test_what_cannot_be_measured():
    with pytest.raises(ValueError, match=r"expected texts of one length above 13 .*\[20, 30\]"):
        loss_curves(tiny_llama(), [prompt(30), prompt(20)], scorer=SCORER, later=9)
    for texts in ([], [prompt(13)]):
        with pytest.raises(ValueError, match="expected texts of one length above 13"):
            loss_curves(tiny_llama(), texts, scorer=SCORER, later=9)
    with pytest.raises(ValueError, match="expected measure to be one of error, mass"):
        loss_curves(tiny_llama(), [prompt(30)], scorer=SCORER, later=9, measure="loss")
    broken = tiny_llama()  # as one that overflows: it would get a plan of no meaning
    broken.model.layers[1].mlp.down_proj.weight.data[0] = float("nan")
    with pytest.raises(ValueError, match="expected finite losses, got NaN"):
        loss_curves(broken, [prompt(30)], scorer=SCORER, later=9)


@pytest.mark.filterwarnings("ignore:every layer of")
def test_a_model_of_sliding_layers_has_nothing_to_plan():
    with pytest.raises(ValueError, match="expected full-attention layers, got none"):
        loss_curves(build("mistral-window"), [prompt(40)], scorer=SCORER, later=9)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("measure", ["error", "mass"])
def test_a_gpu_measures_the_same(family, measure):
    model, ids = build(family), prompt(90, 2)
    settings = {"scorer": SCORER, "later": 20, "measure": measure}
    truth = loss_curves(model, [ids], **settings).loss
    found = loss_curves(model.cuda(), [ids], **settings).loss
    np.testing.assert_allclose(found, truth, atol=1e-4)


# ------------------------------------------------------------------ allocation


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.data())
def test_slopes_fall_and_keep_the_total(gains, data):
    sizes = np.array([data.draw(st.integers(1, 4)) for _ in gains])
    slopes = falling(np.array(gains, dtype=float), sizes)
    assert (np.diff(slopes) <= 1e-12).all()
    assert float(slopes @ sizes) == pytest.approx(sum(gains))
    # Nowhere below the curve: the smallest concave one above it.
    assert (np.cumsum(slopes * sizes) >= np.cumsum(gains) - 1e-9).all()


@given(seed=st.integers(0, 10**6), cells=st.integers(1, 3), total=st.integers(0, 12))
def test_no_other_split_loses_less(seed, cells, total):
    """Convex curves on a grid of 2: against every split in whole pages."""
    slots = np.array([2, 4, 6, 8])
    steps = -np.sort(-np.random.default_rng(seed).integers(0, 6, (cells, 3)), axis=1)
    loss = 20.0 - np.concatenate([np.zeros((cells, 1)), steps.cumsum(1)], axis=1)
    pages = min(total // 2, 3 * cells)
    counts = best_counts(loss, slots, 2 * cells + 2 * pages)
    assert counts.sum() == 2 * cells + 2 * pages
    best = min(
        sum(loss[c, n] for c, n in enumerate(choice))
        for choice in itertools.product(range(4), repeat=cells)
        if sum(choice) == pages
    )
    assert lost(loss, slots, counts) == pytest.approx(best)


@given(
    seed=st.integers(0, 10**6), cells=st.integers(1, 5), share=st.floats(0, 1),
    weight=st.integers(1, 3),
)  # fmt: skip
def test_the_sum_is_exact_and_repeats(seed, cells, share, weight):
    slots = np.array([4, 20, 36, 47])
    loss = -np.random.default_rng(seed).random((cells, 4)).cumsum(1)
    units = cells * 4 + round(share * cells * 43)
    counts = best_counts(loss, slots, units * weight, weight)
    assert counts.sum() == units and (counts >= 4).all() and (counts <= 47).all()
    assert (counts == best_counts(loss, slots, units * weight, weight)).all()


def test_equal_gains_go_around():
    """One page of each cell in turn, the earlier cells first."""
    loss, slots = -np.ones((3, 4)).cumsum(1), np.array([2, 4, 6, 8])
    assert best_counts(loss, slots, 16).tolist() == [6, 6, 4]
    for total in (5, 25):
        with pytest.raises(ValueError, match="expected a total from 6 to 24 slots, got"):
            best_counts(loss, slots, total)


def test_a_layer_where_all_counts_stays_full():
    slots = np.array([2, 4, 6, 8])
    loss = np.zeros((3, 2, 4))
    loss[1] = np.arange(4)[::-1] * 5.0  # as good to the last page
    loss[0, 0] = [7, 3, 1, 0]
    by_head = split(loss, slots, 5, "head")
    assert by_head.tolist() == [[8, 2], [8, 8], [2, 2]] and by_head.sum() == 30
    assert split(loss, slots, 5, "layer").tolist() == [[5, 5], [8, 8], [2, 2]]


def test_texts_left_out_decide():
    """Where the texts disagree about heads, a plan by head loses more of the other."""
    slots, curves = np.array([2, 4, 6, 8]), np.zeros((2, 2, 2, 4))
    curves[:, 0] = [9, 6, 3, 0]
    agreeing = Curves(curves.copy(), slots, 8)
    curves[0, 0, 0], curves[1, 0, 1] = 0, 0
    loss = compare(Curves(curves, slots, 8), 3)
    assert loss["layer"] < loss["head"]
    loss = compare(agreeing, 3)
    assert loss["layer"] == loss["head"] < loss["uniform"]
    one = compare(Curves(curves[:1], slots, 8), 3)  # of itself
    assert one["head"] < one["layer"]


# ------------------------------------------------------------------ plans


def test_a_plan_is_what_the_policy_spends():
    """The same counts at the plan's own length and budget; in the cache of the model, too."""
    model, texts = tiny_llama(2), [prompt(80, 1), prompt(80, 2)]
    for per in ("auto", "layer", "head"):
        plan = make_plan(model, texts, keep=24, scorer=SCORER, later=16, per=per, page=4)
        assert plan.slots.sum() == 6 * 24 and (plan.tokens, plan.budget) == (64, 24)
        assert per in ("auto", plan.per)
        policy = Planned(SCORER, plan.shares, plan.head_dim)
        loop = Loop(sparsekv.patch(model, policy, 24))
        loop.feed(prompt(64, 3))
        held = [[len(head) for head in layer] for layer in loop.kept()]
        assert held == plan.slots.tolist()
        sparsekv.unpatch(model)
    assert all(0 < loss < 1 for loss in plan.loss.values())


def test_plans_repeat_and_settings_are_checked():
    model, texts = tiny_llama(2), [prompt(80, 1)]
    plans = [make_plan(model, texts, keep=0.3, scorer=SCORER, later=16) for _ in range(2)]
    assert (plans[0].slots == plans[1].slots).all() and plans[0].loss == plans[1].loss
    assert plans[0].budget == 19
    for keep in (4, 65):
        with pytest.raises(ValueError, match="expected a budget above the 4 tokens of the window"):
            make_plan(model, texts, keep=keep, scorer=SCORER, later=16)
    with pytest.raises(ValueError, match="expected per to be one of auto, layer, head"):
        make_plan(model, texts, keep=8, scorer=SCORER, later=16, per="page")


def test_files(tmp_path):
    plan = make_plan(tiny_llama(2), [prompt(80)], keep=24, scorer=SCORER, later=16, page=4)
    file = tmp_path / "plan.json"
    write_plan(plan, file, {"sparsekv": "1", "model": {"name": "x"}, "texts": []})
    data = json.loads(file.read_text())
    assert data["model"] == {"name": "x", "layers": 3, "kv_heads": 2, "head_dim": 16}
    assert data["shares"] == (plan.slots - 4).tolist() and data["sparsekv"] == "1"
    policy = Planned.load(file, scorer=SCORER)
    assert policy == Planned(SCORER, plan.shares, 16)
    assert plan.policy() == Planned(SnapKV(window=4), plan.shares, 16)
    with pytest.raises(ValueError, match="expected the model that the plan was made for"):
        sparsekv.patch(tiny_llama(num_hidden_layers=2), policy, 24)


# ------------------------------------------------------------------ command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def call(*arguments):
    return CliRunner().invoke(cli.APP, [str(argument) for argument in arguments])


def test_plan_then_generate(folder, tmp_path):
    text, plan = tmp_path / "text.txt", tmp_path / "plan.json"
    text.write_text("".join(chr(97 + i * i % 25) for i in range(500)))
    where = ("--model", folder, "--device", "cpu")
    small = ("--tokens", 128, "--later", 32, "--stretches", 2)
    made = call("plan", "--text", text, "--keep", 0.5, "--out", plan, *small, *where)
    assert made.exit_code == 0, made.output
    lines = made.stdout.splitlines()
    assert lines[0].startswith("slots of 128, 64 a head on average, by ")
    assert lines[1].startswith("layer 0: ") and lines[-1] == f"written: {plan}"
    data = json.loads(plan.read_text())
    assert data["texts"][0]["stretches"] == 2 and len(data["texts"][0]["sha256"]) == 64
    assert np.sum(data["shares"]) == 4 * (64 - 32)
    assert (data["measure"], data["later_tokens"]) == ("error", "part of the prompt")
    other = tmp_path / "mass.json"
    mass = ("--measure", "mass", "--goes-on", "--per", "layer", "--keep", 64)
    made = call("plan", "--text", text, "--out", other, *mass, *small, *where)
    assert made.exit_code == 0 and "attention missed on texts left out" in made.stdout, made.output
    data = json.loads(other.read_text())
    assert (data["measure"], data["later_tokens"]) == ("mass", "next of the text")
    assert all(len(set(row)) == 1 for row in data["shares"])
    use = ("--policy", "planned", "--plan", plan, "--budget", 40, *where)
    done = call("generate", "--prompt-file", text, "--max-new-tokens", 2, *use)
    assert done.exit_code == 0 and "kept 40 of" in done.stderr, done.output
    pytest.importorskip("matplotlib")
    shown = call("show-kept", "--prompt", text, "--out", tmp_path / "kept.png", *use)
    assert shown.exit_code == 0 and shown.stdout.startswith("planned: 40 of"), shown.output


def test_a_plan_stays_within_the_positions_of_the_model(tmp_path):
    model = save_tiny_model(tmp_path / "short", max_position_embeddings=160)
    text, plan = tmp_path / "text.txt", tmp_path / "plan.json"
    text.write_text("".join(chr(97 + i * i % 25) for i in range(500)))
    line = ("plan", "--text", text, "--out", plan, "--keep", 48, "--later", 32, "--model", model)
    made = call(*line, "--device", "cpu")
    assert made.exit_code == 0 and made.stdout.startswith("slots of 128,"), made.output
    made = call(*line, "--device", "cpu", "--tokens", 129)
    assert_one_line(made, "expected a text of at most 160 tokens, the positions that the model")


def test_diagnose_commands(folder, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "folder"
    where = ("--model", folder, "--device", "cpu", "--out", out)
    first = call("diagnose", "massive", "--tokens", 40, "--magnitude", 0, "--ratio", 3, *where)
    assert first.exit_code == 0, first.output
    assert "massive activations at" in first.stdout and "times the median" in first.stdout
    second = call("diagnose", "attention", "--tokens", 100, "--top", 5, "--top", 9, *where)
    assert second.exit_code == 0, second.output
    assert "100 tokens, mean of all heads: " in second.stdout and "in the 9 best" in second.stdout
    assert len(list(out.iterdir())) == 8


@pytest.mark.parametrize("command", [["plan"], ["diagnose"], ["diagnose", "massive"]])
def test_help_has_an_example(command):
    result = call(*command, "-h")
    assert result.exit_code == 0 and "Example" in result.stdout
    assert " ".join(["sparsekv", *command]) in result.stdout


def test_mistakes_are_one_line(folder, tmp_path, monkeypatch):
    """Found before a model is loaded, where they can be."""
    short = tmp_path / "short.txt"
    short.write_text("x" * 50)
    where = ("--model", folder, "--device", "cpu")
    result = call("plan", "--text", short, "--out", tmp_path / "plan.json", *where)
    assert_one_line(result, "expected a text of 1792 tokens or more, got 50 in 'short.txt'")
    monkeypatch.setattr(cli.models, "load", None)  # a call would raise TypeError
    mistakes = [
        (("plan", "--out", short, "--keep", "x"), "expected a budget like 512 or 0.25"),
        (("plan", "--out", short, "--per", "page"), "expected per to be one of auto, layer, head"),
        (("plan", "--out", tmp_path / "no" / "p.json"), "expected --out in a folder that exists"),
        (
            ("plan", "--out", short, "--text", tmp_path / "absent.txt"),
            "absent.txt': No such file or directory",
        ),
        (("diagnose", "massive", "--out", tmp_path, "--text", "no.txt"), "'no.txt': No such file"),
        (("generate", "--prompt", "x", "--plan", short), "expected --plan with --policy planned"),
        (
            ("generate", "--prompt", "x", "--policy", "planned", "--plan", short),
            "expected a plan that `sparsekv plan` wrote",
        ),
    ]
    for arguments, message in mistakes:
        assert_one_line(call(*arguments), message)


def assert_one_line(result, message):
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.exit_code == 2 and len(errors) == 1 and message in errors[0], result.output
