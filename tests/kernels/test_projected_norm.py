"""|v W_O|_1 per KV head: reference and kernel answer to the whole projection in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, HAS_GPU, IMPLEMENTATIONS, device_of
from torch import Tensor

from sparsekv.kernels import projected_norm as module
from sparsekv.kernels.projected_norm import (
    projected_norm,
    projected_norm_reference,
    projected_norm_triton,
)

everywhere = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
LENGTHS = (0, 1, 15, 16, 17, 33, 53) + ((127, 128, 129, 300) if HAS_GPU else ())


@dataclass(frozen=True)
class Values:
    """v [B, HK, T, D] and w_o [D_model, HK * G * D]; layout: how v is strided."""

    batch: int = 2
    heads: int = 2
    group: int = 2
    tokens: int = 17
    head_dim: int = 16
    model_dim: int = 40
    layout: str = "heads"
    dtype: int = 0
    seed: int = 0

    def tensors(self, implementation: str) -> tuple[Tensor, Tensor]:
        choices = DTYPES[implementation]
        kind = {"dtype": choices[self.dtype % len(choices)], "device": device_of(implementation)}
        rng = torch.Generator().manual_seed(self.seed)
        size = (self.batch, self.heads, self.tokens, self.head_dim)
        v = torch.randn(size, generator=rng).to(**kind)
        if self.layout == "tokens":  # as a projection gives it: [B, T, HK, D]
            v = v.transpose(1, 2).contiguous().transpose(1, 2)
        if self.layout == "fused":  # a slice of a wider projection
            wide = torch.full((*size[:3], self.head_dim + 8), torch.nan, **kind)
            wide[..., 8:] = v
            v = wide[..., 8:]
        columns = self.heads * self.group * self.head_dim
        w_o = torch.randn(self.model_dim, columns, generator=rng) / columns**0.5
        return v, w_o.to(**kind)


CASES = st.builds(
    Values,
    batch=st.integers(1, 2),
    heads=st.integers(1, 3),
    group=st.sampled_from((1, 2, 3, 4, 8)),
    tokens=st.sampled_from(LENGTHS),
    head_dim=st.sampled_from((16, 64, 80)),
    model_dim=st.integers(1, 100),
    layout=st.sampled_from(("heads", "tokens", "fused")),
    dtype=st.integers(0, 2),
    seed=st.integers(0, 2**16),
)


def run(implementation: str, v: Tensor, w_o: Tensor) -> Tensor:
    function = projected_norm_reference if implementation == "reference" else projected_norm_triton
    return function(v, w_o).cpu()


def oracle(v: Tensor, w_o: Tensor) -> Tensor:
    """float64, one query head after the other, from the T x D_model product."""
    v, w_o = v.cpu().double(), w_o.cpu().double()
    batch, heads, tokens, dim = v.shape
    group = w_o.shape[1] // (heads * dim)
    truth = torch.zeros(batch, heads, tokens, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads * group):
            block = w_o[:, h * dim : (h + 1) * dim]  # [D_model, D]
            truth[b, h // group] += (v[b, h // group] @ block.T).abs().sum(-1) / group
    return truth


def check(implementation: str, v: Tensor, w_o: Tensor) -> None:
    """fp32 sums of exact products, whatever the dtype of the inputs."""
    norms = run(implementation, v, w_o)
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), oracle(v, w_o), rtol=1e-5, atol=1e-5)


@everywhere
@given(case=CASES)
def test_matches_float64(implementation: str, case: Values) -> None:
    check(implementation, *case.tensors(implementation))


@everywhere
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [0, 1])
def test_every_head_dim(implementation: str, head_dim: int, dtype: int) -> None:
    case = Values(head_dim=head_dim, dtype=dtype, layout="tokens", model_dim=70)
    check(implementation, *case.tensors(implementation))


@everywhere
def test_golden_values_of_criticalkv(implementation: str) -> None:
    """eviction.md 20.3: W_O = I_4 for both query heads, so the norm is |v|_1. Padded to D = 8."""
    v = [
        [-2, 1, -2, -1],
        [0, 0, -2, 2],
        [1, 2, -2, 1],
        [-1, 0, 2, -1],
        [1, -2, -1, 2],
        [0, 0, -1, -2],
    ]
    kind: dict[str, Any] = {"dtype": torch.float32, "device": device_of(implementation)}
    values = torch.zeros(1, 1, 6, 8, **kind)
    values[..., :4] = torch.tensor(v, **kind)
    eye = torch.eye(8, **kind)[:4]
    norms = run(implementation, values, torch.cat([eye, eye], 1))
    assert norms.flatten().tolist() == [6, 4, 6, 4, 6, 3]


@everywhere
def test_heads_do_not_mix(implementation: str) -> None:
    """A query head whose projection is 0 halves the mean; another KV head's is not looked at."""
    v, w_o = Values(heads=2, group=2).tensors(implementation)
    whole = run(implementation, v, w_o)
    w_o[:, 16:] = 0
    first = run(implementation, v, w_o)
    assert (first[:, 1] == 0).all() and (first[:, 0] < whole[:, 0]).all()
    w_o[:, 16:32] = w_o[:, :16]
    torch.testing.assert_close(run(implementation, v, w_o)[:, 0], 2 * first[:, 0])


def test_chunks_of_the_reference_add_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    v, w_o = Values(tokens=70).tensors("reference")
    whole = projected_norm(v, w_o)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(projected_norm(v, w_o), whole)


def test_what_does_not_fit_is_refused() -> None:
    v, w_o = Values().tensors("reference")
    with pytest.raises(ValueError, match=r"expected w_o with a multiple of HK \* D = 2 \* 16"):
        projected_norm(v, w_o[:, :-1])
    with pytest.raises(ValueError, match="expected w_o of dtype"):
        projected_norm(v, w_o.half())
    with pytest.raises(ValueError, match=r"expected v.stride\(-1\) == 1"):
        projected_norm(v.transpose(2, 3).contiguous().transpose(2, 3), w_o)
    with pytest.raises(ValueError, match="expected v of shape"):
        projected_norm(v[0], w_o)
    with pytest.raises(ValueError, match="multiple of 8"):
        projected_norm(v[..., :4], w_o)
