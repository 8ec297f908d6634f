"""Row entropies: reference and kernel answer to dense float64 probabilities and to what entropy is:
log n of n equal keys, 0 of one, and what attention over the keys themselves gives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from oracle import attention, dense_logits, probabilities, sequences
from strategies import HAS_GPU, IMPLEMENTATIONS, Packed, packed
from tolerance import _assert_within, logit_error
from torch import Tensor

from sparsekv.kernels import row_entropy as module
from sparsekv.kernels.prefill import prefill_attention
from sparsekv.kernels.row_entropy import (
    row_entropy,
    row_entropy_reference,
    row_entropy_triton,
)

some = settings(max_examples=max(8, settings.default.max_examples // 2))
everywhere = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def problem(case: Packed, implementation: str) -> dict[str, Any]:
    """Keyword arguments of row_entropy: a packed problem and its true lse."""
    t = case.tensors(implementation)
    lse = attention(t)[1]
    t = {name: x for name, x in t.items() if name not in ("v", "sinks")}
    kind = torch.float64 if t["q"].dtype == torch.float64 else torch.float32
    return t | {"lse": lse.to(t["q"].device, kind)}


def run(implementation: str, t: dict[str, Any]) -> Tensor:
    function = row_entropy_reference if implementation == "reference" else row_entropy_triton
    return function(**t).cpu()


def oracle(t: dict[str, Any]) -> tuple[Tensor, float]:
    """(entropies float64 [HQ, Tq], max |logit|) from dense logits."""
    truth, top = torch.zeros(t["q"].shape[1], t["q"].shape[0], dtype=torch.float64), 0.0
    for sq, sk in sequences(t):
        x = dense_logits(t, sq, sk)
        p = probabilities(x, t["lse"][:, sq].cpu().double())
        truth[:, sq] = torch.special.entr(p).sum(-1)
        top = max(top, float(x.masked_fill(x == -torch.inf, 0).abs().amax())) if x.numel() else top
    return truth, top


def check(implementation: str, t: dict[str, Any]) -> None:
    """dh = - sum p (1 + log p) dx, and |dx| is within a logit's error."""
    entropy = run(implementation, t)
    assert entropy.dtype == torch.float32
    truth, top = oracle(t)
    _assert_within("entropy", entropy, truth, 3.0 * logit_error(top) * (1.0 + truth))


@everywhere
@some
@given(case=packed(positions=False))
def test_matches_float64(implementation: str, case: Packed) -> None:
    check(implementation, problem(case, implementation))


@everywhere
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [0, 1])
def test_every_head_dim(implementation: str, head_dim: int, dtype: int) -> None:
    case = Packed((19,), (35,), 1, 2, head_dim, gap=1, dtype=dtype, window=20)
    check(implementation, problem(case, implementation))


@pytest.mark.skipif(HAS_GPU, reason="shipped GPU tiles are covered by the GPU runs")
@pytest.mark.parametrize("tiles", [(32, 16), (16, 16), (16, 64)])
@pytest.mark.parametrize("window", [None, 40])
def test_any_tile_shape(
    tiles: tuple[int, int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The zone bounds do not lean on one tile being a multiple of the other."""
    monkeypatch.setitem(module._CONFIG, ("cpu", 16), module._Tiles(*tiles, 4, 1))
    for lengths_q, lengths_k in (((70, 33), (70, 33)), ((21,), (75,)), ((50,), (20,))):
        case = Packed(lengths_q, lengths_k, group=1, window=window)
        check("interpreter", problem(case, "interpreter"))
        check("interpreter", problem(replace(case, align="left"), "interpreter"))


@everywhere
def test_equal_keys_are_log_n(implementation: str) -> None:
    """And a sliding window counts its own n; the first row has one key."""
    for window in (None, 9):
        t = problem(Packed((40,), (40,), values="equal keys", window=window), implementation)
        seen = torch.arange(1, 41).clamp_max(window or 40)
        torch.testing.assert_close(
            run(implementation, t), seen.log().expand(2, -1), rtol=1e-4, atol=1e-5
        )


@everywhere
def test_it_is_what_attention_over_the_keys_gives(implementation: str) -> None:
    """lse - scale q . sum p k, without softcap: the identity of the docstring."""
    case = Packed((50, 7), (50, 30), kv_heads=2, gap=2)
    t = case.tensors(implementation)
    v = t.pop("v")
    t.pop("sinks")
    mean, lse = prefill_attention(**t, v=t["k"].to(v.dtype))
    entropy = row_entropy(**t, lse=lse)
    logits = torch.einsum("thd,thd->ht", t["q"].float(), mean.float()) * t["softmax_scale"]
    real = lse > -torch.inf
    torch.testing.assert_close(entropy[real], (lse - logits)[real], rtol=2e-3, atol=2e-2)
    assert (entropy[~real] == 0).all()


def test_a_sink_takes_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own term is missing: with it, the entropy is that of one more key."""
    t = Packed((30,), (30,), sinks=2.0).tensors("reference")
    lse = prefill_attention(**t)[1]
    sinks = t.pop("sinks")
    t.pop("v")
    x = dense_logits(t, slice(0, 30), slice(0, 30))
    whole = torch.cat([x, sinks.double()[:, None, None].expand(-1, 30, 1)], -1).softmax(-1)
    own = torch.special.entr((sinks[:, None] - lse).exp())
    torch.testing.assert_close(
        (row_entropy(**t, lse=lse) + own).double(), torch.special.entr(whole).sum(-1),
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip


def test_what_does_not_fit_is_refused() -> None:
    t = problem(Packed((30,), (30,)), "reference")
    with pytest.raises(ValueError, match="expected lse of shape"):
        row_entropy(**(t | {"lse": t["lse"][:1]}))
    with pytest.raises(ValueError, match="expected window >= 1"):
        row_entropy(**(t | {"window": 0}))
    with pytest.raises(ValueError, match="expected softcap > 0"):
        row_entropy(**(t | {"softcap": -1.0}))
