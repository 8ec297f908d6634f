"""The noise: Triton, torch and Python give the same bits, and those are noise."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from strategies import HAS_GPU
from torch import Tensor

from sparsekv.kernels._noise import (
    fold,
    fold_reference,
    gumbel2,
    gumbel_reference,
    log2_normal,
    stream,
    uniform,
    uniform_reference,
)

DEVICE = "cuda" if HAS_GPU else "cpu"
WORDS = st.integers(0, 2**32 - 1)
TOP = -1  # 0xFFFFFFFF, the hash with the largest u


@triton.jit
def _draw_kernel(hashes, words, u, zeta2, key, N: tl.constexpr):
    offs = tl.arange(0, N)
    h = fold(tl.cast(key, tl.uint32), tl.load(words + offs))
    tl.store(hashes + offs, h.to(tl.int32, bitcast=True))
    tl.store(u + offs, uniform(h))
    tl.store(zeta2 + offs, gumbel2(h))


@triton.jit
def _log2_kernel(x, y, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(y + offs, log2_normal(tl.load(x + offs)))


def draw(words: Tensor, key: int) -> tuple[Tensor, Tensor, Tensor]:
    hashes = torch.empty_like(words)
    u, zeta2 = (torch.empty(words.shape, device=DEVICE) for _ in range(2))
    _draw_kernel[(1,)](hashes, words, u, zeta2, key, N=len(words))
    return hashes, u, zeta2


def lowbias32(h: int) -> int:
    """As published: https://github.com/skeeto/hash-prospector."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        h = (h ^ (h >> shift)) * factor & 0xFFFFFFFF
    return h


def unsigned(x: int) -> int:
    return x & 0xFFFFFFFF


@given(key=WORDS, first=st.integers(0, 2**31 - 65))
def test_triton_torch_and_python_agree(key: int, first: int) -> None:
    """Hash and u bit for bit, positions up to 2^31; Gumbel to a few ulp."""
    words = torch.arange(first, first + 64, dtype=torch.int32, device=DEVICE)
    key = key - (1 << 32) if key >= 1 << 31 else key
    hashes, u, zeta2 = draw(words, key)
    assert torch.equal(hashes, fold_reference(key, words))
    assert torch.equal(u, uniform_reference(hashes))
    torch.testing.assert_close(zeta2 * math.log(2), gumbel_reference(hashes), rtol=2e-6, atol=2e-6)
    for word, h, x in zip(words.tolist(), hashes.tolist(), u.tolist(), strict=True):
        assert unsigned(h) == lowbias32(unsigned(unsigned(key) + 0x9E3779B9 * (word + 1)))
        assert x == (unsigned(h) // 512 + 0.5) / 2**23


@given(values=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
def test_stream_is_the_chain(values: list[int]) -> None:
    h: int | Tensor = 0
    for value in values:
        h = fold_reference(h, torch.tensor([value], dtype=torch.int32))
    assert stream(*values) == h.item()


def test_u_is_never_0_or_1() -> None:
    """The extremes of the hash give finite noise, in torch and in Triton."""
    u = uniform_reference(torch.tensor([0, 511, TOP], dtype=torch.int32))
    assert u.tolist() == [2.0**-24, 2.0**-24, 1 - 2.0**-24]
    for zeta in (-math.log(-math.log(2.0**-24)), -math.log(-math.log1p(-(2.0**-24)))):
        assert -2.9 < zeta < 16.7
    extremes = gumbel_reference(torch.tensor([0, TOP], dtype=torch.int32))
    assert extremes.isfinite().all() and float(extremes[1]) == pytest.approx(16.6355, abs=1e-3)


def test_log2_is_relatively_exact_near_1() -> None:
    """Noise is largest where u is nearly 1 and its logarithm nearly 0."""
    near = 1 + torch.tensor([-1, 1], dtype=torch.float64)[:, None] * 2.0 ** -torch.arange(1, 23)
    x = torch.cat([near.flatten(), 2.0 ** torch.linspace(-126, 127, 211, dtype=torch.float64)])
    x = torch.cat([x, torch.tensor([1 - 2.0**-24], dtype=torch.float64)]).float().to(DEVICE)
    assert len(x) == 256
    y = torch.empty_like(x)
    _log2_kernel[(1,)](x, y, N=256)
    torch.testing.assert_close(y.double(), x.double().log2(), rtol=4e-7, atol=0)


def test_it_is_gumbel_noise() -> None:
    """Mean is Euler's constant, variance pi^2 / 6; neighbours and heads do not correlate."""
    grid = [torch.arange(n, dtype=torch.int32) for n in (4, 300, 300)]
    row = fold_reference(fold_reference(stream(0, 3), grid[0])[:, None], grid[1])
    zeta = gumbel_reference(fold_reference(row[..., None], grid[2])).double()
    assert zeta.shape == (4, 300, 300)
    assert float(zeta.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(zeta.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
    for pair in ((zeta[0], zeta[1]), (zeta[:, 1:], zeta[:, :-1]), (zeta[..., 1:], zeta[..., :-1])):
        both = torch.stack([x.flatten() for x in pair])
        assert abs(float(torch.corrcoef(both)[0, 1])) < 0.015


@pytest.mark.skipif(
    importlib.util.find_spec("sparsekv.policies.noise") is None, reason="no policies/noise.py yet"
)
def test_policies_draw_the_same_numbers() -> None:
    """Policies may not import kernels, so they have their own copy."""
    from sparsekv.policies import noise

    words = torch.arange(1000, dtype=torch.int32)
    h = fold_reference(stream(1, 2), words)
    assert torch.equal(noise.uniform(1, 2, words), uniform_reference(h))
