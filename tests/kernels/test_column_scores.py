"""Column scores: the torch reference, the kernel in the interpreter and the kernel on a GPU answer
to dense float64 probabilities and to the conservation laws of softmax.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import attention, dense_logits, probabilities, row_lse, sequences
from strategies import HAS_GPU, IMPLEMENTATIONS, Packed, packed
from tolerance import assert_scores_close, logit_error
from torch import Tensor

from sparsekv.kernels import _column_scores_tma
from sparsekv.kernels import column_scores as module
from sparsekv.kernels.column_scores import (
    column_scores,
    column_scores_reference,
    column_scores_triton,
)

few = settings(max_examples=max(4, settings.default.max_examples // 5))
everywhere = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
GROUPS = ("mean", "max", "sum", "layer_mean")


def problem(case: Packed, implementation: str, **options: Any) -> dict[str, Any]:
    """Keyword arguments of column_scores: a packed problem, its true lse, and `options`."""
    t = case.tensors(implementation)
    lse = attention(t)[1]
    t = {name: x for name, x in t.items() if name not in ("v", "sinks")}
    kind = torch.float64 if t["q"].dtype == torch.float64 else torch.float32
    return t | {"lse": lse.to(t["q"].device, kind)} | options


def run(implementation: str, t: dict[str, Any]) -> Tensor:
    function = column_scores_reference if implementation == "reference" else column_scores_triton
    return function(**t).cpu()


def oracle(t: dict[str, Any], nudge: float = 0.0) -> tuple[Tensor, float]:
    """(scores float64, max |logit|) from dense logits; nudge is added to every log threshold."""
    rows, statistic = t.get("rows"), t.get("statistic", "sum")
    heads, kv_heads = t["q"].shape[1], t["k"].shape[1]
    slices = sequences(t)
    columns = torch.zeros(len(slices), heads, t["max_seqlen_k"], dtype=torch.float64)
    top = 0.0
    for n, (sq, sk) in enumerate(slices):
        x = dense_logits(t, sq, sk)
        p = probabilities(x, t["lse"][:, sq].cpu().double())
        if rows is not None:
            p[:, : max(0, p.shape[1] - rows)] = 0
        if statistic == "count":
            limit = (t["log_threshold"][sq].cpu().double() + nudge).exp()[:, None]
            column = ((p < limit) & (p > 0)).double().sum(1)
        elif statistic == "max":
            column = p.amax(1) if p.shape[1] else p.sum(1)
        else:
            weights = t.get("row_weights")
            weights = torch.ones(p.shape[1]) if weights is None else weights[sq].cpu()
            column = torch.einsum("hij,i->hj", p, weights.double())
        columns[n, :, : x.shape[2]] = column
        top = max(top, float(x.masked_fill(x == -torch.inf, 0).abs().amax())) if x.numel() else top
    grouped = columns.unflatten(1, (kv_heads, -1))
    group = t.get("group", "mean")
    if group == "layer_mean":
        return columns.mean(1, keepdim=True), top
    return {"mean": grouped.mean(2), "sum": grouped.sum(2), "max": grouped.amax(2)}[group], top


def check(implementation: str, t: dict[str, Any]) -> None:
    scores = run(implementation, t)
    assert scores.dtype == torch.float32
    if t.get("statistic") != "count":
        truth, top = oracle(t)
        assert_scores_close(scores, truth, top)
        return
    slack = 2 * logit_error(
        oracle(t)[1]
    )  # a row within rounding of its threshold may go either way
    low, high = oracle(t, -slack)[0], oracle(t, slack)[0]
    assert scores.shape == low.shape
    assert ((scores >= low - 1e-5) & (scores <= high + 1e-5)).all()


@st.composite
def statistics(draw: st.DrawFn) -> dict[str, Any]:
    """statistic, group and rows; a float asks for random row_weights or log_thresholds."""
    options = {
        "statistic": draw(st.sampled_from(("sum", "sum", "max", "count"))),
        "group": draw(st.sampled_from(GROUPS)),
        "rows": draw(st.sampled_from((None, None, 1, 8, 40, 1000))),
    }
    if options["statistic"] == "sum":
        options["row_weights"] = draw(st.sampled_from((None, 1.0)))
    if options["statistic"] == "count":
        options["log_threshold"] = draw(st.sampled_from((0.0, -2.0, -4.0)))
    return options


def with_rows(t: dict[str, Any], seed: int) -> dict[str, Any]:
    """Replace the float of row_weights / log_threshold by random values around it, fp32 [Tq]."""
    rng = torch.Generator().manual_seed(seed)
    for name in ("row_weights", "log_threshold"):
        if isinstance(t.get(name), float):
            noise = torch.rand(t["q"].shape[0], generator=rng)
            t[name] = (t[name] + noise).to(t["q"].device)
    return t


@everywhere
@given(case=packed(), options=statistics())
def test_matches_float64(implementation: str, case: Packed, options: dict[str, Any]) -> None:
    check(implementation, with_rows(problem(case, implementation, **options), case.seed))


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
    """The zone bounds do not lean on one tile being a multiple of the other."""
    monkeypatch.setitem(module._CONFIG, ("cpu", 16), module._Tiles(*tiles, 4, 1))
    for lengths_q, lengths_k in (((70, 33), (70, 33)), ((21,), (75,)), ((50,), (20,))):
        case = Packed(lengths_q, lengths_k, group=1, window=window)
        for rows in (None, 20):
            check("interpreter", problem(case, "interpreter", rows=rows))
        check("interpreter", problem(replace(case, align="left"), "interpreter"))


@everywhere
@few
@given(
    case=packed(positions=False, window=None, softcap=None, dtype=1),
    rows=st.sampled_from((None, 1, 8, 40, 64, 256)),
    group=st.sampled_from(("mean", "sum", "layer_mean")),
)
def test_plain_sums(implementation: str, case: Packed, rows: int | None, group: str) -> None:
    """16-bit sums, which take the kernel whose tiles the hardware fetches (sm90)."""
    if implementation == "gpu":  # few variants to compile
        case, group = replace(case, head_dim=128, kv_heads=2, group=4, gap=3), "mean"
    check(implementation, problem(case, implementation, rows=rows, group=group))


@pytest.mark.skipif(HAS_GPU, reason="shipped GPU tiles are covered by the GPU runs")
@pytest.mark.parametrize("tiles", [(32, 16), (16, 16), (16, 64), (64, 32)])
@pytest.mark.parametrize("heads_first", [True, False])
def test_any_tile_shape_of_plain_sums(
    tiles: tuple[int, int], heads_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = [(0, _column_scores_tma.Tiles(*tiles, 4, 1, heads_first))]
    monkeypatch.setitem(_column_scores_tma.CONFIG, ("cpu", 16), choice)
    for lengths_q, lengths_k in (((70, 33), (70, 33)), ((21,), (75,)), ((50, 9), (20, 0))):
        case = Packed(lengths_q, lengths_k, kv_heads=2, group=3, gap=2, dtype=1)
        for rows in (None, 20):
            check("interpreter", problem(case, "interpreter", rows=rows))
        check("interpreter", problem(replace(case, align="left"), "interpreter"))
        check("interpreter", problem(replace(case, causal=False), "interpreter"))


@pytest.mark.skipif(HAS_GPU, reason="GPU machines differ in whether they have descriptors")
def test_what_takes_the_pointer_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides without a descriptor and every option, with the same result where both can."""
    t = problem(Packed((40, 9), (40, 30), kv_heads=2, dtype=1, gap=2), "interpreter")
    scores = run("interpreter", t)
    monkeypatch.setattr(_column_scores_tma, "launch", None)  # a call would raise
    with pytest.raises(TypeError):
        run("interpreter", t)
    odd = torch.empty(len(t["k"]), 2, 20).half()[..., 3:19].copy_(t["k"])
    torch.testing.assert_close(run("interpreter", t | {"k": odd}), scores, rtol=1e-5, atol=1e-6)
    weights = {"row_weights": torch.ones(len(t["q"]))}
    torch.testing.assert_close(run("interpreter", t | weights), scores, rtol=1e-5, atol=1e-6)
    for options in ({"group": "max"}, {"statistic": "max"}, {"window": 5}, {"softcap": 3.0}):
        run("interpreter", t | options)


@everywhere
@pytest.mark.parametrize(("windowed", "rows"), [(False, None), (False, 9), (True, None)])
def test_every_alignment_of_the_edges(
    implementation: str, windowed: bool, rows: int | None
) -> None:
    """The diagonal and the window's edge meet the row tiles at every possible offset.

    The window is wider than two tiles, so that there are rows which see a whole block of keys.
    """
    reach, tiles = (66, 192) if implementation == "gpu" else (17, 48)
    lengths_q = (tiles + reach + 3 if windowed else 2 * reach + 3,) * (2 * reach + 1)
    lengths_k = tuple(range(reach, 3 * reach + 1))
    case = Packed(lengths_q, lengths_k, group=1, window=tiles if windowed else None)
    check(implementation, problem(case, implementation, rows=rows))


@everywhere
def test_long_sequences_head_by_head(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the queries do not fit the L2 the grid runs one KV head after the other."""
    monkeypatch.setattr(module, "_L2_BYTES", 0)
    case = Packed((40, 9), (40, 30), kv_heads=2, group=3, gap=2)
    check(implementation, problem(case, implementation))


@everywhere
@few
@given(case=packed(small=True))
def test_mass_is_conserved(implementation: str, case: Packed) -> None:
    """Over all keys, "sum" adds up to the rows that see a key, less what the sink took."""
    t = problem(case, implementation, group="sum")
    scores = run(implementation, t).double()
    assert (scores >= 0).all()
    for n, (sq, sk) in enumerate(sequences(t)):
        assert (scores[n, :, sk.stop - sk.start :] == 0).all()
        x = dense_logits(t, sq, sk)
        lse = t["lse"][:, sq].cpu().double()
        mass = (row_lse(t, x) - lse).exp().nan_to_num(0.0)  # 1 without a sink, 0 for empty rows
        mass = mass.unflatten(0, (case.kv_heads, case.group)).sum((1, 2))
        top = float(x.masked_fill(x == -torch.inf, 0).abs().amax()) if x.numel() else 0.0
        error = (scores[n].sum(-1) - mass).abs()
        assert (error <= 2 * logit_error(top) * mass + 1e-6).all()


@everywhere
@few
@given(case=packed(small=True), cut=st.integers(0, 50))
def test_disjoint_rows_add_up(implementation: str, case: Packed, cut: int) -> None:
    """Row weights that sum to one split the scores; `rows` is the indicator of the last rows."""
    t = problem(case, implementation)
    whole = run(implementation, t)
    last = torch.zeros(t["q"].shape[0], device=t["q"].device)
    for sq, _ in sequences(t):
        last[max(sq.start, sq.stop - cut) : sq.stop] = 1.0
    late = run(implementation, t | {"row_weights": last})
    early = run(implementation, t | {"row_weights": 1 - last})
    torch.testing.assert_close(early + late, whole, rtol=1e-5, atol=1e-6)
    if cut:
        torch.testing.assert_close(
            run(implementation, t | {"rows": cut}), late, rtol=1e-5, atol=1e-6
        )


@everywhere
@few
@given(case=packed(small=True), options=statistics())
def test_rows_beyond_all_is_all(implementation: str, case: Packed, options: dict[str, Any]) -> None:
    t = with_rows(problem(case, implementation, **options), case.seed)
    everything = run(implementation, t | {"rows": None})
    for rows in (max(1, t["max_seqlen_q"]), 2**40):
        new = run(implementation, t | {"rows": rows})
        torch.testing.assert_close(new, everything, rtol=1e-5, atol=1e-6)


@everywhere
@few
@given(case=packed(small=True, causal=True, align="right", positions=False, group=1, window=None))
def test_the_last_key_is_seen_by_its_own_row_only(implementation: str, case: Packed) -> None:
    t = problem(case, implementation)
    scores = run(implementation, t)
    for n, (sq, sk) in enumerate(sequences(t)):
        if sq.stop > sq.start and sk.stop > sk.start:
            x = dense_logits(t, sq, sk)[:, -1, -1]
            own = (x - t["lse"][:, sq.stop - 1].cpu().double()).exp()
            slack = 2 * logit_error(40.0)
            last = scores[n, :, sk.stop - sk.start - 1].double()
            torch.testing.assert_close(last, own, rtol=slack, atol=1e-7)


@everywhere
@few
@given(case=packed(small=True, positions=False))
def test_sum_is_the_gradient_of_the_lse(implementation: str, case: Packed) -> None:
    """Adding b_j to every logit of key j changes sum_i lse_i by sum_i p_ij per unit."""
    t = case.tensors(implementation)
    scores = run(implementation, problem(case, implementation, group="sum"))
    for n, (sq, sk) in enumerate(sequences(t)):
        x = dense_logits(t, sq, sk)
        x = x[
            :, (x > -torch.inf).any(-1).all(0)
        ]  # rows that see a key; the gradient of others: NaN
        bias = torch.zeros(x.shape[0], 1, x.shape[2], dtype=torch.float64, requires_grad=True)
        row_lse(t, x + bias).sum().backward()
        gradient = bias.grad[:, 0].unflatten(0, (case.kv_heads, case.group)).sum(1)
        top = float(x.masked_fill(x == -torch.inf, 0).abs().amax()) if x.numel() else 0.0
        assert_scores_close(scores[n, :, : x.shape[2]], gradient, top)


@everywhere
@few
@given(case=packed(small=True, causal=False, window=None, positions=False), options=statistics())
def test_key_permutation_permutes_scores(
    implementation: str, case: Packed, options: dict[str, Any]
) -> None:
    t = with_rows(problem(case, implementation, **options), case.seed)
    scores = run(implementation, t)
    order = torch.arange(t["k"].shape[0])
    rng = torch.Generator().manual_seed(case.seed)
    expected = scores.clone()
    for n, (_, sk) in enumerate(sequences(t)):
        shuffled = torch.randperm(sk.stop - sk.start, generator=rng)
        order[sk] = sk.start + shuffled
        expected[n, :, : sk.stop - sk.start] = scores[n][:, shuffled]
    new = run(implementation, t | {"k": t["k"][order.to(t["k"].device)]})
    torch.testing.assert_close(new, expected, rtol=1e-5, atol=1e-6)


@everywhere
def test_count_is_strict_and_per_row(implementation: str) -> None:
    """Four equal keys, p = 1/4 in every row: thresholds above log 1/4 count, hidden keys never."""
    case = Packed((4,), (4,), group=1, values="zeros", causal=False)
    high, low = -1.3, -1.4  # log 1/4 = -1.386
    threshold = torch.tensor([high, low, high, high])
    t = problem(case, implementation, statistic="count")
    scores = run(implementation, t | {"log_threshold": threshold.to(t["q"].device)})
    assert scores.tolist() == [[[3.0] * 4]]
    t = problem(replace(case, causal=True), implementation, statistic="count")
    everything = torch.full((4,), 1e30, device=t["q"].device)
    scores = run(implementation, t | {"log_threshold": everything})
    assert scores.tolist() == [[[4.0, 3.0, 2.0, 1.0]]]


@everywhere
@pytest.mark.parametrize("statistic", ["sum", "max", "count"])
def test_rows_without_mass_count_for_nothing(implementation: str, statistic: str) -> None:
    """A row marked by lse = -inf contributes 0, even where the mask would let it see keys."""
    case = Packed((40,), (40,), kv_heads=2, gap=2)
    t = problem(case, implementation, statistic=statistic)
    if statistic == "count":
        t["log_threshold"] = torch.full((t["q"].shape[0],), 1.0, device=t["q"].device)
    t["lse"][:, 5:30] = -torch.inf
    check(implementation, t)


@everywhere
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("lengths", [((), ()), ((0,), (0,)), ((0, 3), (5, 0)), ((4,), (0,))])
def test_nothing_to_do(
    implementation: str, lengths: tuple[tuple[int, ...], ...], group: str
) -> None:
    t = problem(Packed(*lengths, gap=2), implementation, group=group)
    scores = run(implementation, t)
    shape = (len(lengths[0]), 1, t["max_seqlen_k"])
    assert torch.equal(scores, torch.zeros(shape))


def test_reference_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunking bounds the reference's memory and nothing else."""
    monkeypatch.setattr("sparsekv.kernels._masked._CHUNK_ELEMENTS", 1)
    for options in ({}, {"window": 20}, {"align": "left"}, {"causal": False}):
        case = Packed((50, 33), (61, 20), **options)
        for statistic in ("sum", "max"):
            check("reference", problem(case, "reference", statistic=statistic, rows=40))


MISTAKES: dict[str, dict[str, Any]] = {
    "lse of shape": {"lse": torch.zeros(4, 2)},
    "rows": {"rows": 0},
    "statistic in": {"statistic": "mean"},
    "group in": {"group": "median"},
    "log_threshold with": {"statistic": "count"},
    "only then": {"log_threshold": torch.zeros(4)},
    "row_weights only": {"statistic": "max", "row_weights": torch.zeros(4)},
    "row_weights of shape": {"row_weights": torch.zeros(5)},
    "row_weights of dtype": {"row_weights": torch.zeros(4, dtype=torch.int32)},
    "row_weights.stride": {"row_weights": torch.zeros(1).expand(4)},
    "window": {"window": -1},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_refused(message: str) -> None:
    t = problem(Packed((4,), (4,)), "reference") | MISTAKES[message]
    with pytest.raises(ValueError, match=rf"expected .*{message}.*got"):
        column_scores(**t)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [None, 32, 256])
def test_gpu_long_and_deterministic(rows: int | None) -> None:
    """Long bf16 sequences: mass is conserved, and runs agree bitwise."""
    from sparsekv.kernels.prefill import prefill_attention

    case = Packed((6000, 3000), (6000, 3000), kv_heads=2, group=4, head_dim=128)
    t = case.tensors("gpu")
    lse = prefill_attention(**t)[1]
    t = {name: x for name, x in t.items() if name not in ("v", "sinks")} | {"lse": lse}
    scores = column_scores(**t, rows=rows)
    for _ in range(20):
        assert torch.equal(scores, column_scores(**t, rows=rows))
    for n, length in enumerate(case.lengths_q):
        mass = float(min(length, rows or length))
        torch.testing.assert_close(
            scores[n].sum(-1), torch.full((2,), mass).cuda(), rtol=1e-4, atol=0
        )
