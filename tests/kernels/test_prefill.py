"""Prefill attention: the torch reference, the kernel in the interpreter and the kernel on a GPU
answer to the same dense float64 oracle and to the same identities of softmax attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from oracle import attention, sequences
from strategies import HAS_GPU, IMPLEMENTATIONS, Packed, packed
from tolerance import assert_lse_close, assert_out_close
from torch import Tensor

from sparsekv.kernels import prefill
from sparsekv.kernels._masked import MAX_TOKEN_STRIDE
from sparsekv.kernels.prefill import prefill_attention, prefill_reference, prefill_triton

few = settings(max_examples=max(4, settings.default.max_examples // 5))
everywhere = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def run(implementation: str, t: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, lse) on the CPU."""
    function = prefill_reference if implementation == "reference" else prefill_triton
    out, lse = function(**t)
    return out.cpu(), lse.cpu()


def check(implementation: str, t: dict[str, Any]) -> None:
    """The result is within the error budget of the oracle, also where there is nothing to see."""
    out, lse = run(implementation, t)
    true_out, true_lse, weight, top = attention(t)
    assert out.dtype == t["q"].dtype and lse.dtype == torch.float32
    assert_lse_close(lse, true_lse, top)
    assert_out_close(out, true_out, weight, top)


@everywhere
@given(case=packed())
def test_matches_float64(implementation: str, case: Packed) -> None:
    check(implementation, case.tensors(implementation))


@everywhere
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [0, 1])
def test_every_head_dim(implementation: str, head_dim: int, dtype: int) -> None:
    case = Packed((19,), (35,), 1, 2, head_dim, gap=1, dtype=dtype, window=20)
    check(implementation, case.tensors(implementation))


@pytest.mark.skipif(HAS_GPU, reason="shipped GPU tiles are covered by the GPU runs")
@pytest.mark.parametrize("tiles", [(16, 32), (16, 16), (32, 64)])
@pytest.mark.parametrize("window", [None, 40])
def test_any_tile_shape(
    tiles: tuple[int, int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The zone bounds do not lean on one tile being a multiple of the other."""
    monkeypatch.setitem(prefill._CONFIG, ("cpu", 16), ((0, prefill._Tiles(*tiles, 4, 1)),))
    for lengths_q, lengths_k in (((70, 33), (70, 33)), ((21,), (75,)), ((50,), (20,))):
        case = Packed(lengths_q, lengths_k, group=1, window=window)
        check("interpreter", case.tensors("interpreter"))
        check("interpreter", replace(case, align="left").tensors("interpreter"))


@everywhere
@pytest.mark.parametrize("windowed", [False, True])
def test_every_alignment_of_the_edges(implementation: str, windowed: bool) -> None:
    """The diagonal and the window's edge meet the key tiles at every possible offset.

    The window is wider than two tiles, so that there are keys which a whole block of rows sees.
    """
    reach, tiles = (66, 192) if implementation == "gpu" else (17, 48)
    lengths_q = (2 * reach - 1,) * (2 * reach + 1)  # a whole tile of rows and a bit
    first = 1 + tiles + reach if windowed else 3
    case = Packed(lengths_q, tuple(range(first, first + 2 * reach + 1)), group=1)
    case = replace(case, window=tiles if windowed else None)
    check(implementation, case.tensors(implementation))


@everywhere
def test_long_sequences_head_by_head(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When K and V do not fit the L2 the grid runs one KV group after the other."""
    monkeypatch.setattr(prefill, "_L2_BYTES", 0)
    case = Packed((40, 9), (40, 30), kv_heads=2, group=3, gap=2)
    check(implementation, case.tensors(implementation))


@everywhere
@few
@given(case=packed(positions=False, window=None, softcap=None, dtype=1))
def test_with_descriptors(implementation: str, case: Packed) -> None:
    """Plain 16-bit prompts, which take the kernel whose tiles the hardware fetches (sm90)."""
    check(implementation, case.tensors(implementation))


@pytest.mark.skipif(HAS_GPU, reason="GPU machines differ in whether they have descriptors")
def test_layouts_without_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hardware cannot copy takes the pointer kernel, with the same result."""
    t = Packed((40, 9), (40, 30), kv_heads=2, dtype=1, gap=2).tensors("interpreter")
    out, lse = run("interpreter", t)
    monkeypatch.setattr(prefill, "prefill_tma_kernel", None)  # a launch of it would raise
    with pytest.raises(TypeError):
        run("interpreter", t)
    odd = {name: torch.empty(len(t[name]), 2, 20).half() for name in ("k", "v")}
    heads_first = {name: torch.empty(2, len(t[name]), 16).half() for name in ("k", "v")}
    for name in ("k", "v"):
        odd[name] = odd[name][..., 3:19].copy_(t[name])  # 6 bytes off, heads 40 bytes apart
        heads_first[name] = heads_first[name].transpose(0, 1).copy_(t[name])
    for layout in (odd, heads_first):
        other_out, other_lse = run("interpreter", t | layout)
        torch.testing.assert_close(other_lse, lse, rtol=0, atol=2e-6)
        torch.testing.assert_close(other_out, out, rtol=0, atol=2e-3)


@everywhere
@few
@given(case=packed(small=True, causal=False, positions=False, window=None, sinks=None, dtype=0))
def test_splitting_keys_and_merging_by_lse(implementation: str, case: Packed) -> None:
    t = case.tensors(implementation)
    whole, whole_lse = run(implementation, t)
    used = t["cu_seqlens_k"].diff() if t.get("seqused_k") is None else t["seqused_k"]
    left = used // 3
    parts = []
    for start, length in (
        (t["cu_seqlens_k"][:-1], left),
        (t["cu_seqlens_k"][:-1] + left, used - left),
    ):
        cu = torch.cat([start, t["cu_seqlens_k"][-1:]]).int()
        parts.append(run(implementation, t | {"cu_seqlens_k": cu, "seqused_k": length.int()}))
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    scale = [(part_lse - lse).exp().nan_to_num(0.0).T[..., None] for _, part_lse in parts]
    out = sum(part.float() * s for (part, _), s in zip(parts, scale, strict=True))
    _, _, weight, top = attention(t)
    assert_lse_close(lse, whole_lse.double(), 2 * top)
    assert_out_close(out.to(whole.dtype), whole.double(), 2 * weight, top)


@everywhere
@few
@given(case=packed(small=True, gap=0, positions=False, sinks=None))
def test_permuting_heads_and_sequences(implementation: str, case: Packed) -> None:
    """KV groups and sequences are independent: reordering them reorders the result, bitwise."""
    t = case.tensors(implementation)
    out, lse = run(implementation, t)
    order_q, order_k = zip(*reversed(sequences(t)), strict=True)
    index_q = torch.cat([torch.arange(s.start, s.stop) for s in order_q])
    index_k = torch.cat([torch.arange(s.start, s.stop) for s in order_k])
    flipped = t | {"q": t["q"].cpu()[index_q].flip(1), "v": t["v"].cpu()[index_k].flip(1)}
    flipped |= {"k": t["k"].cpu()[index_k].flip(1)}
    for side, order in (("q", order_q), ("k", order_k)):
        cu = torch.tensor([0, *(s.stop - s.start for s in order)]).cumsum(0)
        flipped[f"cu_seqlens_{side}"] = cu.int().to(t["q"].device)
    flipped |= {name: flipped[name].to(t["q"].device) for name in ("q", "k", "v")}
    new_out, new_lse = run(implementation, flipped)
    exact = {"rtol": 0, "atol": 1e-6 if implementation == "reference" else 0}
    torch.testing.assert_close(new_out, out[index_q].flip(1), **exact)
    torch.testing.assert_close(new_lse, lse[:, index_q].flip(0), **exact)


@everywhere
@few
@given(case=packed(small=True, gap=0, align="right", positions=False))
def test_hidden_keys_change_nothing(implementation: str, case: Packed) -> None:
    """Cutting a sequence short equals having NaN there; the future is invisible, bitwise."""
    t = case.tensors(implementation)
    lengths = t["cu_seqlens_k"].diff()
    less = (lengths - 2).clamp(min=0).int()
    out, lse = run(implementation, t | {"seqused_k": less})
    poisoned = {name: t[name].clone() for name in ("k", "v")}
    for (_, sk), keep in zip(sequences(t), less.tolist(), strict=True):
        for x in poisoned.values():
            x[sk.start + keep : sk.stop] = torch.nan
    new_out, new_lse = run(implementation, t | poisoned | {"seqused_k": less})
    assert torch.equal(out, new_out) and torch.equal(lse, new_lse)


@everywhere
@few
@given(case=packed(small=True, causal=True, align="left", positions=False, gap=0))
def test_the_future_is_invisible(implementation: str, case: Packed) -> None:
    """Overwriting keys that no query may see (left alignment, more keys) changes no bit."""
    case = replace(case, lengths_q=tuple(n // 2 for n in case.lengths_k))
    t = case.tensors(implementation)
    out, lse = run(implementation, t)
    changed = {name: t[name].clone() for name in ("k", "v")}
    for sq, sk in sequences(t):
        for x in changed.values():
            x[sk.start + sq.stop - sq.start : sk.stop] = torch.nan
    new_out, new_lse = run(implementation, t | changed)
    assert torch.equal(out, new_out) and torch.equal(lse, new_lse)


@everywhere
@few
@given(case=packed(small=True, window=None, positions=False))
def test_a_window_of_everything_is_no_window(implementation: str, case: Packed) -> None:
    t = case.tensors(implementation)
    out, lse = run(implementation, t)
    for window in (t["max_seqlen_k"] + t["max_seqlen_q"] + 1, 2**40):
        new_out, new_lse = run(implementation, t | {"window": window})
        assert torch.equal(out, new_out) and torch.equal(lse, new_lse)


@everywhere
@few
@given(case=packed(small=True, values="normal", softcap=None, sinks=None, dtype=0))
def test_a_constant_logit_shifts_only_the_lse(implementation: str, case: Packed) -> None:
    t = case.tensors(implementation)
    t["q"][..., 0], t["k"][..., 0] = 1.0, 0.0
    out, lse = run(implementation, t)
    t["k"][..., 0] = 8.0  # exact in every dtype: logits grow by 8 * softmax_scale = 2
    new_out, new_lse = run(implementation, t)
    shift = 8.0 * t["softmax_scale"]
    assert_lse_close(new_lse, lse.double() + shift, 10.0)
    tolerance = 1e-5 if out.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(new_out, out, rtol=tolerance, atol=tolerance)


@everywhere
@few
@given(case=packed(small=True, sinks=None))
def test_outputs_are_averages_of_values(implementation: str, case: Packed) -> None:
    t = case.tensors(implementation)
    out, lse = run(implementation, t)
    slack = 1e-5 if out.dtype == torch.float32 else 2e-2
    for sq, sk in sequences(t):
        if sk.stop == sk.start:
            continue
        v = t["v"][sk].cpu().float().repeat_interleave(case.group, dim=1)
        low, high = v.amin(0) - slack * v.abs().amax(0), v.amax(0) + slack * v.abs().amax(0)
        empty = torch.isinf(lse[:, sq].T)[..., None]
        rows = out[sq].float()
        assert (((rows >= low) & (rows <= high)) | empty).all()


@everywhere
@few
@given(case=packed(small=True, sinks=None))
def test_sinks(implementation: str, case: Packed) -> None:
    """A sink of -inf is no sink; a finite one only scales the row by 1 - exp(sink - lse)."""
    t = case.tensors(implementation)
    out, lse = run(implementation, t)
    none = torch.full((t["q"].shape[1],), -torch.inf, device=t["q"].device)
    new_out, new_lse = run(implementation, t | {"sinks": none})
    torch.testing.assert_close(new_out, out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(new_lse, lse, rtol=1e-6, atol=1e-6)
    new_out, new_lse = run(implementation, t | {"sinks": none.fill_(1.5)})
    expected = torch.logaddexp(lse.double(), torch.tensor(1.5, dtype=torch.float64))
    expected = expected.masked_fill(lse == -torch.inf, -torch.inf)
    assert_lse_close(new_lse, expected, 2 * attention(t)[-1] + 5)
    scale = (lse - new_lse).exp().nan_to_num(0.0).T[..., None]
    slack = 1e-4 if out.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(new_out.float(), out.float() * scale, rtol=slack, atol=slack)


@everywhere
@few
@given(case=packed(small=True, causal=True, align="right", positions=False))
def test_positions_of_a_permuted_cache(implementation: str, case: Packed) -> None:
    """Shuffled keys with their positions attend like keys in order; so do shuffled queries."""
    t = case.tensors(implementation)
    out, lse = run(implementation, t)
    rng = torch.Generator().manual_seed(case.seed)
    order = {side: torch.arange(t[side].shape[0]) for side in ("q", "k")}
    position = {side: torch.full_like(order[side], -1) for side in ("q", "k")}
    for sq, sk in sequences(t):
        nq, nk = sq.stop - sq.start, sk.stop - sk.start
        for side, s, first in (("q", sq, nk - nq), ("k", sk, 0)):
            shuffled = torch.randperm(s.stop - s.start, generator=rng)
            order[side][s] = s.start + shuffled
            position[side][s] = first + shuffled
    device = t["q"].device
    moved = {"q": t["q"][order["q"].to(device)], "k": t["k"][order["k"].to(device)]}
    moved |= {"v": t["v"][order["k"].to(device)]}
    moved |= {f"positions_{side}": position[side].int().to(device) for side in ("q", "k")}
    new_out, new_lse = run(implementation, t | moved)
    _, _, weight, top = attention(t)
    assert_lse_close(new_lse, lse[:, order["q"]].double(), 2 * top)
    assert_out_close(new_out, out[order["q"]].double(), 2 * weight[order["q"]], top)


@everywhere
def test_left_padded_batch_equals_its_rows(implementation: str) -> None:
    """A [B, T] batch with left padding is cu[b] = b T + pad_b, seqused = T - pad_b."""
    rows, length, pads = 3, 37, (0, 30, 36)
    case = Packed((length,) * rows, (length,) * rows, kv_heads=2, group=2, layout="fused")
    t = case.tensors(implementation)
    device = t["q"].device
    for b, pad in enumerate(pads):
        for name in ("q", "k", "v"):
            t[name][b * length : b * length + pad] = torch.nan
    cu = torch.tensor([*(b * length + pad for b, pad in enumerate(pads)), rows * length])
    used = torch.tensor([length - pad for pad in pads])
    for side in ("q", "k"):
        t |= {f"cu_seqlens_{side}": cu.int().to(device), f"seqused_{side}": used.int().to(device)}
    out, lse = run(implementation, t)
    for b, pad in enumerate(pads):
        row = slice(b * length + pad, (b + 1) * length)
        alone = t | {name: t[name][row] for name in ("q", "k", "v")}
        alone |= {f"cu_seqlens_{s}": torch.tensor([0, length - pad]).int().to(device) for s in "qk"}
        alone |= {"seqused_q": None, "seqused_k": None}
        row_out, row_lse = run(implementation, alone)
        torch.testing.assert_close(row_out, out[row], rtol=0, atol=2e-6)
        torch.testing.assert_close(row_lse, lse[:, row], rtol=0, atol=2e-6)
        assert (out[b * length : b * length + pad] == 0).all()
        assert (lse[:, b * length : b * length + pad] == -torch.inf).all()


@everywhere
@pytest.mark.parametrize("lengths", [((), ()), ((0,), (0,)), ((0, 3), (5, 0)), ((4,), (0,))])
def test_nothing_to_do(implementation: str, lengths: tuple[tuple[int, ...], ...]) -> None:
    check(implementation, Packed(*lengths, gap=2).tensors(implementation))
    check(implementation, Packed(*lengths, gap=2, sinks=1.0).tensors(implementation))


def test_float64_reference_is_exact() -> None:
    """On float64 tensors the reference is the oracle, so it can serve as truth elsewhere."""
    t = Packed((40, 7), (40, 30), softcap=5.0, sinks=0.5, window=12).tensors("reference")
    t |= {name: t[name].double() for name in ("q", "k", "v")}
    out, lse = prefill_attention(**t)
    true_out, true_lse, _, _ = attention(t)
    torch.testing.assert_close(out, true_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, true_lse, rtol=1e-12, atol=1e-12)


def test_reference_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunking bounds the reference's memory and nothing else."""
    monkeypatch.setattr("sparsekv.kernels._masked._CHUNK_ELEMENTS", 1)
    for options in ({}, {"window": 20}, {"align": "left"}, {"causal": False}):
        check("reference", Packed((50, 33), (61, 20), **options).tensors("reference"))


MISTAKES = {
    "head_dim": {
        "q": torch.zeros(4, 2, 20),
        "k": torch.zeros(4, 1, 20),
        "v": torch.zeros(4, 1, 20),
    },
    "multiple of KV heads": {"k": torch.zeros(4, 3, 16), "v": torch.zeros(4, 3, 16)},
    "v of shape": {"v": torch.zeros(5, 1, 16)},
    "k of dtype": {"k": torch.zeros(4, 1, 16, dtype=torch.float16)},
    "stride": {"v": torch.zeros(4, 16, 2).transpose(1, 2)[:, :1]},
    "cu_seqlens_k of shape": {"cu_seqlens_k": torch.zeros(3, dtype=torch.int32)},
    "cu_seqlens_q of dtype": {"cu_seqlens_q": torch.tensor([0, 4])},
    "seqused_q of shape": {"seqused_q": torch.zeros(2, dtype=torch.int32)},
    "align": {"align": "middle"},
    "window": {"window": 0},
    "softcap": {"softcap": 0.0},
    "softmax_scale": {"softmax_scale": 0.0},
    "sinks of shape": {"sinks": torch.zeros(3)},
    "both positions_q": {"positions_q": torch.zeros(4, dtype=torch.int32)},
    "causal=True": {
        "positions_q": torch.zeros(4, dtype=torch.int32),
        "positions_k": torch.zeros(4, dtype=torch.int32),
        "causal": False,
    },
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_refused(message: str) -> None:
    t = Packed((4,), (4,)).tensors("reference") | MISTAKES[message]
    with pytest.raises(ValueError, match=rf"expected .*{message}.*got"):
        prefill_attention(**t)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1000, 20000])  # both tile choices of sm90
def test_gpu_long_and_deterministic(length: int) -> None:
    """Long causal attention equals torch's own within bf16 rounding, and itself bitwise."""
    case = Packed((length,), (length,), kv_heads=2, group=4, head_dim=128)
    t = case.tensors("gpu")
    out, lse = prefill_attention(**t)
    for _ in range(5):
        again, again_lse = prefill_attention(**t)
        assert torch.equal(out, again) and torch.equal(lse, again_lse)
    heads = {name: t[name].transpose(0, 1)[None] for name in ("q", "k", "v")}
    heads = {n: x.repeat_interleave(8 // x.shape[1], dim=1) for n, x in heads.items()}
    theirs = torch.nn.functional.scaled_dot_product_attention(
        heads["q"], heads["k"], heads["v"], is_causal=True
    )[0].transpose(0, 1)
    error = (out.float() - theirs.float()).norm() / theirs.float().norm()
    assert error < 8e-3, f"relative error {error:.2e}"


@pytest.mark.gpu
def test_gpu_strides_beyond_32_bits() -> None:
    """Token offsets are 64-bit: the last keys lie more than 2^31 elements behind the first."""
    t = Packed((160,), (160,), head_dim=64).tensors("gpu")
    stride = MAX_TOKEN_STRIDE - 16
    storage = torch.zeros(160 * stride + 64, dtype=t["k"].dtype, device="cuda")
    wide = storage.as_strided((160, 1, 64), (stride, 64, 1))
    wide.copy_(t["k"])
    new_out, new_lse = prefill_attention(**t | {"k": wide, "v": wide})
    out, lse = prefill_attention(**t | {"v": t["k"]})
    assert torch.equal(new_out, out) and torch.equal(new_lse, lse)


def test_larger_strides_are_refused() -> None:
    """Inside a tile offsets are 32-bit, so a stride that could overflow them is an error."""
    t = Packed((1,), (1,), head_dim=64).tensors("reference")
    wide = t["k"].as_strided((1, 1, 64), (MAX_TOKEN_STRIDE, 64, 1))
    with pytest.raises(ValueError, match=r"expected k.stride\(0\) < 16777216"):
        prefill_attention(**t | {"k": wide})
