"""Perturbed column sums, of a prompt and of a decode step, against explicit T x T softmaxes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import dense_logits, sequences
from strategies import HAS_GPU, IMPLEMENTATIONS, Packed, device_of, packed
from tolerance import assert_scores_close
from torch import Tensor

from sparsekv.kernels import _perturb_row as row_module
from sparsekv.kernels import perturb as module
from sparsekv.kernels.column_scores import column_scores
from sparsekv.kernels.perturb import (
    perturbed_columns,
    perturbed_columns_reference,
    perturbed_columns_triton,
    perturbed_row,
    perturbed_row_reference,
    perturbed_row_triton,
)
from sparsekv.kernels.prefill import prefill_attention

few = settings(max_examples=max(4, settings.default.max_examples // 5))
everywhere = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
GROUPS = ("mean", "max", "sum", "layer_mean")
LARGEST = 17.0  # no Gumbel draw is larger
OPTIONS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "layer": st.integers(0, 100),
        "tau": st.sampled_from((1.0, 1.0, 2.0, 0.5, 1.37)),
        "noise": st.sampled_from(("gumbel", "gumbel", "gumbel", "none")),
        "group": st.sampled_from(GROUPS),
        "rows": st.sampled_from((None, None, 1, 8, 40, 1000)),
    }
)
PLAIN = {"seed": 5, "layer": 2, "tau": 1.5}


def zeta(seed: int, layer: int, heads: Any, i: Any, j: Any) -> Tensor:
    """Noise float64 [heads, i, j] as the module defines it, in numpy."""

    def fold(h: np.ndarray, value: np.ndarray) -> np.ndarray:
        h = (h + 0x9E3779B9 * ((value + 1) & 0xFFFFFFFF)) & 0xFFFFFFFF
        h = ((h ^ (h >> np.uint64(16))) * np.uint64(0x7FEB352D)) & np.uint64(0xFFFFFFFF)
        h = ((h ^ (h >> np.uint64(15))) * np.uint64(0x846CA68B)) & np.uint64(0xFFFFFFFF)
        return h ^ (h >> np.uint64(16))

    def column(x: Any) -> np.ndarray:
        return np.asarray(x, dtype=np.int64).astype(np.uint64)

    h = fold(fold(column([0]), column(seed)), column(layer))
    h = fold(h, column(heads)[:, None, None])
    h = fold(fold(h, column(i)[:, None]), column(j))
    u = ((h >> np.uint64(9)).astype(np.float64) + 0.5) / 2**23
    return torch.from_numpy(-np.log(-np.log(u)))


def problem(case: Packed, implementation: str, **options: Any) -> dict[str, Any]:
    """Keyword arguments of perturbed_columns."""
    t = case.tensors(implementation)
    return {n: x for n, x in t.items() if n not in ("v", "sinks")} | PLAIN | options


def run(implementation: str, t: dict[str, Any]) -> Tensor:
    reference = implementation == "reference"
    return (perturbed_columns_reference if reference else perturbed_columns_triton)(**t).cpu()


def positions(t: dict[str, Any], sq: slice, sk: slice) -> tuple[Tensor, Tensor]:
    if t.get("positions_q") is not None:
        return t["positions_q"][sq].cpu(), t["positions_k"][sk].cpu()
    nq, nk = sq.stop - sq.start, sk.stop - sk.start
    shift = nk - nq if t.get("align", "right") == "right" else 0
    return torch.arange(nq) + shift, torch.arange(nk)


def softmax_rows(t: dict[str, Any], n: int, sq: slice, sk: slice) -> tuple[Tensor, float]:
    """(perturbed probabilities float64 [HQ, nq, nk] of sequence n, max |logit|)."""
    x = dense_logits(t, sq, sk)
    top = float(x.masked_fill(x == -torch.inf, 0).abs().amax()) if x.numel() else 0.0
    if t.get("noise", "gumbel") == "gumbel":
        first = 0 if t.get("first_heads") is None else int(t["first_heads"][n])
        i, j = positions(t, sq, sk)
        x = x + zeta(t["seed"], t["layer"], np.arange(first, first + len(x)), i, j)
        top += LARGEST
    return torch.softmax(x / t["tau"], -1).nan_to_num(0.0), top / min(1.0, t["tau"])


def oracle(t: dict[str, Any]) -> tuple[Tensor, float]:
    slices = sequences(t)
    heads, kv_heads = t["q"].shape[1], t["k"].shape[1]
    columns = torch.zeros(len(slices), heads, t["max_seqlen_k"], dtype=torch.float64)
    largest = 0.0
    for n, (sq, sk) in enumerate(slices):
        p, top = softmax_rows(t, n, sq, sk)
        if t.get("rows") is not None:
            p[:, : max(0, p.shape[1] - t["rows"])] = 0
        columns[n, :, : p.shape[2]] = p.sum(1)
        largest = max(largest, top)
    grouped, group = columns.unflatten(1, (kv_heads, -1)), t.get("group", "mean")
    if group == "layer_mean":
        return columns.mean(1, keepdim=True), largest
    return {"mean": grouped.mean(2), "sum": grouped.sum(2), "max": grouped.amax(2)}[group], largest


def check(implementation: str, t: dict[str, Any]) -> None:
    scores = run(implementation, t)
    assert scores.dtype == torch.float32
    assert_scores_close(scores, *oracle(t))


@everywhere
@given(case=packed(), options=OPTIONS)
def test_matches_float64(implementation: str, case: Packed, options: dict[str, Any]) -> None:
    check(implementation, problem(case, implementation, **options))


@everywhere
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [0, 1])
def test_every_head_dim(implementation: str, head_dim: int, dtype: int) -> None:
    case = Packed((19,), (35,), 1, 2, head_dim, gap=1, dtype=dtype, window=20)
    check(implementation, problem(case, implementation))


@pytest.mark.skipif(HAS_GPU, reason="shipped GPU tiles are covered by the GPU runs")
@pytest.mark.parametrize("tiles", [(32, 16), (16, 16), (64, 32)])
@pytest.mark.parametrize("window", [None, 40])
def test_any_tile_shape(
    tiles: tuple[int, int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module._CONFIG, ("cpu", 16), module._Tiles(*tiles, 4, 1))
    for lengths_q, lengths_k in (((70, 33), (70, 33)), ((21,), (75,)), ((50,), (20,))):
        case = Packed(lengths_q, lengths_k, group=1, window=window)
        for rows in (None, 20):
            check("interpreter", problem(case, "interpreter", rows=rows))
        check("interpreter", problem(replace(case, align="left"), "interpreter"))


@everywhere
@few
@given(case=packed(small=True))
def test_mass_is_conserved(implementation: str, case: Packed) -> None:
    """Whatever the noise, every row that sees a key hands out one unit per query head."""
    t = problem(case, implementation, group="sum")
    mass = run(implementation, t).double().sum((1, 2))
    for n, (sq, sk) in enumerate(sequences(t)):
        rows = (dense_logits(t, sq, sk) > -torch.inf).any(-1).sum()
        assert float(mass[n]) == pytest.approx(float(rows), rel=1e-4, abs=1e-5)


@everywhere
@few
@given(case=packed(small=True, softcap=None))
def test_without_noise_it_is_attention(implementation: str, case: Packed) -> None:
    """zeta = 0 and tau = 1 give the sums of `column_scores` with the attention's lse."""
    t = problem(case, implementation, noise="none", tau=1.0)
    plain = {n: x for n, x in t.items() if n not in ("seed", "layer", "tau", "noise")}
    _, lse = prefill_attention(plain.pop("q"), plain.pop("k"), torch.zeros_like(t["k"]), **plain)
    expected = column_scores(t["q"], t["k"], lse, **plain).cpu()
    torch.testing.assert_close(run(implementation, t), expected, rtol=1e-4, atol=1e-5)


@everywhere
def test_noise_goes_by_head_and_position(implementation: str) -> None:
    """One sequence per KV head, keys in another order, queries in two parts: the same sums."""
    case = Packed((40,), (40,), kv_heads=2, group=3, values="sharp")
    t = problem(case, implementation)
    whole = run(implementation, t)[0]
    kind = {"dtype": torch.int32, "device": t["q"].device}
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).to(t["q"].device)
    parts = torch.zeros_like(whole)
    for rows in (slice(0, 17), slice(17, 40)):
        n = rows.stop - rows.start
        flat = {
            "q": t["q"][rows].unflatten(1, (2, 3)).transpose(0, 1).flatten(0, 1),
            "k": t["k"][order].transpose(0, 1).flatten(0, 1)[:, None].contiguous(),
            "positions_q": torch.arange(rows.start, rows.stop, **kind).repeat(2),
            "positions_k": order.int().repeat(2),
            "cu_seqlens_q": torch.arange(3, **kind) * n,
            "cu_seqlens_k": torch.arange(3, **kind) * 40,
            "first_heads": torch.tensor([0, 3], **kind),
            "max_seqlen_q": n,
        }
        scores = run(implementation, t | flat)[:, 0]
        parts += torch.zeros_like(whole).scatter_(1, order.cpu().expand(2, -1), scores)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)


@everywhere
def test_repeats_and_differs(implementation: str) -> None:
    """The same bits again; other noise for another seed, another layer, another head."""
    case = Packed((33,), (33,), kv_heads=2, group=1, values="zeros")
    t = problem(case, implementation)
    first = run(implementation, t)
    assert torch.equal(run(implementation, t), first)
    assert not torch.allclose(first[:, 0], first[:, 1], rtol=0.01)
    for other in ({"seed": 6}, {"layer": 3}):
        assert not torch.allclose(run(implementation, t | other), first, rtol=0.01)


def test_golden_keyformer(monkeypatch: pytest.MonkeyPatch) -> None:
    """eviction.md 20.3 with its table of noise in place of the hash, tau = 1, all rows."""
    k = [[0, 0, 1, 2], [-2, -2, 2, 2], [-1, -1, 2, 0], [-1, 2, -1, 0]]
    k += [[1, 0, -2, -2], [2, 1, 2, 0], [2, -1, 0, 1], [-2, -1, -2, 0]]
    q0 = [[0, 1, 1, 2], [-1, 0, 2, -1], [-1, 2, 0, 0], [1, 0, 2, 1]]
    q0 += [[-2, -2, 0, 2], [-2, 1, 1, 1], [2, -2, 0, 2], [-1, -2, 0, -2]]
    q1 = [[1, -1, 2, -2], [2, 1, -1, 1], [0, 2, 2, -1], [0, -1, 1, 1]]
    q1 += [[2, 2, 2, 2], [2, -2, -2, 0], [-1, 2, 1, 0], [0, 0, 2, -2]]
    f0 = [1.4144, 3.0961, 1.9344, 0.0837, 0.1831, 0.0217, 0.7991, 0.4673]
    f1 = [3.7836, 0.4510, 1.2513, 0.8557, 0.9058, 0.7388, 0.0077, 0.0060]

    def table(h: Tensor) -> Tensor:
        head, i, j = h // 64, h // 8 % 8, h % 8
        return ((3 * head + 5 * i + 7 * j) % 5 - 2) / 2

    monkeypatch.setattr(module, "stream", lambda *values: 0)
    monkeypatch.setattr(module, "fold_reference", lambda h, value: 8 * h + value)
    monkeypatch.setattr(module, "gumbel_reference", table)
    q = torch.zeros(8, 2, 8)
    q[:, :, :4] = torch.tensor([q0, q1]).transpose(0, 1)
    keys = torch.zeros(8, 2, 8)
    keys[:, :, :4] = torch.tensor(k)[:, None]
    cu = torch.tensor([0, 8], dtype=torch.int32)
    f = perturbed_columns(q, keys, cu, cu, 8, 8, softmax_scale=0.5, seed=0, layer=0, tau=1.0)
    torch.testing.assert_close(f[0], torch.tensor([f0, f1]), atol=6e-5, rtol=0)


def test_what_does_not_fit_is_refused() -> None:
    t = problem(Packed((9,), (9,)), "reference")
    for options, message in (
        ({"tau": 0.0}, "expected tau > 0, got 0.0"),
        ({"noise": "normal"}, "expected noise in "),
        ({"seed": -1}, "expected seed in 0 .. 2"),
        ({"layer": 1 << 32}, "expected layer in 0 .. 2"),
        ({"rows": 0}, "expected rows >= 1 or None, got 0"),
        ({"group": "min"}, "expected group in "),
        ({"first_heads": torch.zeros(2, dtype=torch.int32)}, "expected first_heads of shape"),
        ({"window": 0}, "expected window >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            perturbed_columns(**(t | options))


# --- the row of a decode step -------------------------------------------------------------------

ROWS = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 2),
        "kv_heads": st.integers(1, 2),
        "heads_per_kv": st.sampled_from((1, 2, 3, 4)),
        "slots": st.sampled_from((1, 16, 48, 300)),
        "spare": st.sampled_from((0, 16)),
        "random": st.integers(0, 2**16),
        "zeros": st.booleans(),
    }
)
CALLS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "layer": st.integers(0, 100),
        "tau_start": st.sampled_from((1.0, 0.5)),
        "tau_end": st.sampled_from((2.0, 1.0, 0.25)),
        "tau_steps": st.sampled_from((1, 16, 128)),
        "noise": st.sampled_from(("gumbel", "gumbel", "none")),
        "group": st.sampled_from(("mean", "max", "sum")),
    }
)


def row_problem(shape: dict[str, Any], implementation: str) -> dict[str, Any]:
    """Tensor arguments of perturbed_row: slots hold any positions, NaN and junk beyond lengths."""
    rng = torch.Generator().manual_seed(shape["random"])
    batch, kv_heads, slots = shape["batch"], shape["kv_heads"], shape["slots"]
    heads = kv_heads * shape["heads_per_kv"]
    seqlens = torch.randint(0, slots + 1, (batch, kv_heads), generator=rng)
    seqlens[0, 0] = slots
    logits = 4 * torch.randn(batch, heads, slots + shape["spare"], generator=rng)
    if shape["zeros"]:
        logits[torch.rand(logits.shape, generator=rng) < 0.3] = -torch.inf
    held = (
        torch.arange(logits.shape[2]) < seqlens.repeat_interleave(heads // kv_heads, 1)[..., None]
    )
    probs = torch.softmax(logits.masked_fill(~held, -torch.inf), -1).nan_to_num(0.0)
    q_positions = torch.randint(slots, 4 * slots, (batch,), generator=rng)
    positions = torch.stack(
        [torch.randperm(int(last), generator=rng)[:slots] for last in q_positions]
    )[:, None].repeat(1, kv_heads, 1)
    positions = positions.masked_fill(~held[:, :: heads // kv_heads, :slots], 1 << 30)
    t = {
        "probs": probs.masked_fill(~held, torch.nan),
        "positions": positions.int(),
        "seqlens": seqlens.int(),
        "q_positions": q_positions.int(),
        "prompt_lengths": (q_positions - torch.randint(0, 30, (batch,), generator=rng)).int(),
    }
    return {name: x.to(device_of(implementation)) for name, x in t.items()}


def run_row(implementation: str, t: dict[str, Any]) -> Tensor:
    function = perturbed_row_reference if implementation == "reference" else perturbed_row_triton
    with pytest.MonkeyPatch.context() as patch:
        if implementation == "interpreter":  # several steps and blocks where there are 300 slots
            patch.setattr(row_module, "_CONFIG", ((128, 4), (64, 4)))
        return function(**t).cpu()


def row_oracle(t: dict[str, Any]) -> Tensor:
    """float64, head by head."""
    probs, kv_heads = t["probs"].cpu().double(), t["positions"].shape[1]
    group = probs.shape[1] // kv_heads
    columns = torch.zeros(probs.shape[0], probs.shape[1], t["positions"].shape[2]).double()
    for b in range(probs.shape[0]):
        i = int(t["q_positions"][b])
        turn = min(t["tau_steps"], max(0, i - int(t["prompt_lengths"][b]) + 1))
        tau = t["tau_start"] + turn * (t["tau_end"] - t["tau_start"]) / t["tau_steps"]
        for h in range(probs.shape[1]):
            n = int(t["seqlens"][b, h // group])
            y = probs[b, h, :n].log()
            if t["noise"] == "gumbel":
                j = t["positions"][b, h // group, :n].cpu()
                y = y + zeta(t["seed"], t["layer"], [h], [i], j)[0, 0]
            columns[b, h, :n] = torch.softmax(y / tau, -1).nan_to_num(0.0)
    grouped = columns.unflatten(1, (kv_heads, -1))
    return {"mean": grouped.mean(2), "sum": grouped.sum(2), "max": grouped.amax(2)}[t["group"]]


@everywhere
@given(shape=ROWS, call=CALLS)
def test_row_matches_float64(
    implementation: str, shape: dict[str, Any], call: dict[str, Any]
) -> None:
    t = row_problem(shape, implementation) | call
    columns = run_row(implementation, t)
    assert columns.dtype == torch.float32
    hottest = min(call["tau_start"], call["tau_end"])
    assert_scores_close(columns, row_oracle(t), 2 * LARGEST / min(1.0, hottest))


@everywhere
def test_row_is_a_row_of_the_columns(implementation: str) -> None:
    """From the attention's own probabilities, a decode step gives what a prompt row would."""
    t = problem(Packed((40,), (40,), kv_heads=2, group=2), implementation)
    tau = t.pop("tau")
    x = dense_logits(t, slice(0, 40), slice(0, 40))[:, -1].softmax(-1)
    kind = {"dtype": torch.int32, "device": t["q"].device}
    row = {
        "probs": x.float()[None].to(t["q"].device),
        "positions": torch.arange(40, **kind).repeat(1, 2, 1),
        "seqlens": torch.full((1, 2), 40, **kind),
        "q_positions": torch.tensor([39], **kind),
        "prompt_lengths": torch.tensor([40], **kind),
        "tau_start": tau, "tau_end": 9.0, "tau_steps": 7, "group": "mean", "noise": "gumbel",
    }  # fmt: skip
    columns = run_row(implementation, row | {"seed": t["seed"], "layer": t["layer"]})
    expected = run(implementation, t | {"rows": 1, "tau": tau})
    torch.testing.assert_close(columns, expected, rtol=1e-4, atol=1e-6)


@everywhere
def test_temperature_ramps_from_the_prompt_on(implementation: str) -> None:
    """tau = start in the prompt, one step up for the first new token, end after all steps."""
    logits, kind = torch.tensor([3.0, 0.0]), {"dtype": torch.int32}
    for turn, tau in ((-5, 1.0), (0, 1.0), (1, 1.25), (2, 1.5), (4, 2.0), (100, 2.0)):
        t = {
            "probs": logits.softmax(0)[None, None],
            "positions": torch.tensor([[[0, 1]]], **kind),
            "seqlens": torch.tensor([[2]], **kind),
            "q_positions": torch.tensor([50 + turn - 1], **kind),
            "prompt_lengths": torch.tensor([50], **kind),
        }
        t = {name: x.to(device_of(implementation)) for name, x in t.items()}
        ramp = {"tau_start": 1.0, "tau_end": 2.0, "tau_steps": 4}
        rest = {"seed": 0, "layer": 0, "noise": "none", "group": "mean"}
        columns = run_row(implementation, t | ramp | rest)
        torch.testing.assert_close(columns.flatten(), (logits / tau).softmax(0))


@pytest.mark.gpu
def test_row_replays_in_a_graph() -> None:
    """Captured once, it follows lengths, positions and steps that change between replays."""
    shape = {"batch": 2, "kv_heads": 2, "heads_per_kv": 2, "slots": 300, "spare": 0, "zeros": False}
    call = PLAIN | {"tau_start": 1.0, "tau_end": 2.0, "tau_steps": 16}
    call = {name: value for name, value in call.items() if name != "tau"}
    first, other = (row_problem(shape | {"random": seed}, "gpu") for seed in (1, 2))
    perturbed_row(**first, **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = perturbed_row(**first, **call)
    for name, x in other.items():
        first[name].copy_(x)
    graph.replay()
    assert torch.equal(out, perturbed_row(**other, **call))


def test_row_refuses_what_does_not_fit() -> None:
    shape = {"batch": 2, "kv_heads": 2, "heads_per_kv": 2, "slots": 16, "spare": 0}
    t = row_problem(shape | {"zeros": False, "random": 0}, "reference")
    t |= {"seed": 0, "layer": 0, "tau_start": 1.0, "tau_end": 2.0, "tau_steps": 128}
    for options, message in (
        ({"probs": t["probs"][:, :3]}, "multiple of KV heads"),
        ({"probs": t["probs"][..., :9]}, "expected probs of >= 16 slots, got 9"),
        ({"probs": t["probs"].half()}, "expected probs of dtype"),
        ({"seqlens": t["seqlens"][:, :1].expand(-1, 2)}, "expected contiguous seqlens"),
        ({"q_positions": t["q_positions"].long()}, "expected q_positions of dtype"),
        ({"prompt_lengths": t["seqlens"]}, "expected prompt_lengths of shape"),
        ({"tau_steps": 0}, "tau_steps >= 1"),
        ({"tau_end": 0.0}, "expected tau_start, tau_end > 0"),
        ({"group": "layer_mean"}, "expected group in "),
    ):
        with pytest.raises(ValueError, match=message):
            perturbed_row(**(t | options))
