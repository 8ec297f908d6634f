"""The warp-specialised prefill kernel of Hopper on the GPU; Gluon has no interpreter.

Few variants of the kernel (a compilation takes seconds), many problems for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import attention
from strategies import LAYOUTS, VALUES, Packed
from tolerance import assert_lse_close, assert_out_close

from sparsekv.kernels import _prefill_gluon
from sparsekv.kernels.prefill import prefill_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
HEADS = {"kv_heads": 2, "group": 4, "head_dim": 128}
CASES = {
    "one block": Packed((128,), (128,), **HEADS),
    "one row": Packed((1,), (1,), **HEADS),
    "around a block": Packed((127,), (127,), **HEADS),
    "many blocks": Packed((1000,), (1000,), **HEADS),
    "fewer queries than keys": Packed((1, 70, 128, 200), (65, 333, 500, 1301), **HEADS),
    "more queries than keys": Packed((70, 128, 5, 300, 40), (30, 128, 0, 150, 41), **HEADS),
    "NaN rows between": Packed((1, 70, 128, 300, 0), (65, 130, 0, 301, 9), gap=3, **HEADS),
    "wide gaps": Packed((70, 0, 200), (70, 1, 300), gap=500, **HEADS),
    "not causal": Packed((200, 77), (200, 100), gap=2, causal=False, **HEADS),
    "align left": Packed((200, 77), (300, 50), gap=2, align="left", **HEADS),
    "sinks": Packed((200, 77, 60), (200, 100, 20), gap=2, sinks=1.0, **HEADS),
    "heads first": Packed((200, 77), (200, 100), gap=2, layout="heads", **HEADS),
    "fused": Packed((200, 77), (200, 100), gap=2, layout="fused", **HEADS),
    "fp16": Packed((200, 77), (200, 100), gap=2, dtype=1, **HEADS),
    "head_dim 64": Packed((200, 77), (200, 100), gap=2, **(HEADS | {"head_dim": 64})),
    "groups of 7": Packed((200, 77), (200, 100), gap=2, kv_heads=3, group=7, head_dim=128),
}


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts launches, so that no test passes by the plain kernel."""
    count, launch = [0], _prefill_gluon.launch

    def counting(*args: object) -> None:
        count[0] += 1
        launch(*args)

    monkeypatch.setattr(_prefill_gluon, "launch", counting)
    yield count


def check(case: Packed, repeats: int = 3) -> None:
    """Within the error budget of the float64 oracle, and bitwise equal when run again."""
    t = case.tensors("gpu")
    out, lse = prefill_attention(**t)
    true_out, true_lse, weight, top = attention(t)
    assert_lse_close(lse.cpu(), true_lse, top)
    assert_out_close(out.cpu(), true_out, weight, top)
    for _ in range(repeats):
        again, again_lse = prefill_attention(**t)
        assert torch.equal(out, again) and torch.equal(lse, again_lse)


@pytest.mark.parametrize("name", CASES)
def test_every_edge(name: str, launches: list[int]) -> None:
    check(CASES[name])
    assert launches[0] == 4


@pytest.mark.parametrize("causal", [True, False])
def test_any_lengths(causal: bool) -> None:
    length = st.sampled_from((0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257)) | st.integers(0, 400)

    @settings(max_examples=40)
    @given(
        lengths=st.lists(st.tuples(length, length), min_size=2, max_size=4),
        same=st.booleans(),
        gap=st.sampled_from((1, 3, 130)),
        layout=st.sampled_from(LAYOUTS),
        values=st.sampled_from(VALUES),
        seed=st.integers(0, 2**16),
    )
    def property_(lengths, same, gap, layout, values, seed) -> None:
        lengths_q, lengths_k = zip(*lengths, strict=True)
        case = Packed(lengths_q, lengths_q if same else lengths_k, gap=gap, causal=causal, **HEADS)
        check(replace(case, layout=layout, values=values, seed=seed), repeats=1)

    property_()


def test_future_and_foreign_keys_change_nothing() -> None:
    """Values that no row of a block sees may be NaN (left alignment, more keys), bitwise."""
    t = Packed((100, 200), (333, 290), align="left", gap=2, **HEADS).tensors("gpu")
    out, lse = prefill_attention(**t)
    poisoned = {name: t[name].clone() for name in ("k", "v")}
    for start, rows, keys in ((2, 100, 333), (2 + 333 + 2, 200, 290)):
        for x in poisoned.values():
            x[start + rows : start + keys] = torch.nan
    new_out, new_lse = prefill_attention(**t | poisoned)
    assert torch.equal(out, new_out) and torch.equal(lse, new_lse)


@pytest.mark.parametrize("sequences", [1, 3])
def test_orders_agree_bitwise(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program walks over several blocks; who computes a block does not change a bit."""
    lengths = (4000,) if sequences == 1 else (2500, 130, 3000)
    t = Packed(lengths, lengths, kv_heads=4, group=4, head_dim=128).tensors("gpu")
    results = []
    for persistent in (True, False):
        for kv_heads in (0, 1, 2):
            order = _prefill_gluon.Order(persistent, kv_heads)
            monkeypatch.setattr(_prefill_gluon, "ORDERS", [(0, 1, order)])
            results.append(prefill_attention(**t))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
    assert torch.isfinite(results[0][0]).all()


def test_twenty_repeats_are_bitwise_equal() -> None:
    t = Packed((6000, 3000), (6000, 3000), gap=5, **HEADS).tensors("gpu")
    out, lse = prefill_attention(**t)
    for _ in range(20):
        again, again_lse = prefill_attention(**t)
        assert torch.equal(out, again) and torch.equal(lse, again_lse)


def test_other_strides_take_the_plain_kernel(launches: list[int]) -> None:
    t = Packed((200, 77), (200, 100), gap=2, **HEADS).tensors("gpu")
    out, lse = prefill_attention(**t)
    assert launches[0] == 1
    odd = torch.empty(len(t["k"]), 2, 136, dtype=t["k"].dtype, device="cuda")[..., 3:131]
    new_out, new_lse = prefill_attention(**t | {"k": odd.copy_(t["k"])})
    assert launches[0] == 1
    torch.testing.assert_close(new_lse, lse, rtol=0, atol=1e-5)
    torch.testing.assert_close(new_out, out, rtol=2e-2, atol=2e-2)
