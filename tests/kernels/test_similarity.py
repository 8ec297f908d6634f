"""Redundancy of keys: nearest duplicates and R-KV's column means against the n x n matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, HAS_GPU, IMPLEMENTATIONS, device_of
from torch import Tensor

from sparsekv.kernels import similarity as module
from sparsekv.kernels.similarity import (
    key_similarity,
    nearest_duplicate,
    nearest_duplicate_reference,
    nearest_duplicate_triton,
)

everywhere = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
SLOTS = (1, 15, 16, 17, 33, 53) + ((64, 65, 129, 300) if HAS_GPU else ())
# eviction.md 20.1, padded to D = 8.
GOLDEN_KEYS = [
    [0, 0, 1, 2], [-2, -2, 2, 2], [-1, -1, 2, 0], [-1, 2, -1, 0],
    [1, 0, -2, -2], [2, 1, 2, 0], [2, -1, 0, 1], [-2, -1, -2, 0],
]  # fmt: skip
GOLDEN_R = [0.1475, 0.1213, 0.1253, 0.1157, 0.1066, 0.1279, 0.1336, 0.1222]


@dataclass(frozen=True)
class Clusters:
    """Keys around a few centres, so that duplicates exist; NaN outside offsets .. + lengths."""

    batch: int = 2
    heads: int = 2
    slots: int = 33
    head_dim: int = 16
    centres: int = 3
    spread: float = 0.6
    zeros: bool = False
    shifted: bool = False
    tokens_first: bool = False
    dtype: int = 0
    seed: int = 0

    def tensors(self, implementation: str) -> dict[str, Any]:
        """k, lengths and offsets."""
        choices = DTYPES[implementation]
        kind = {"dtype": choices[self.dtype % len(choices)], "device": device_of(implementation)}
        rng = torch.Generator().manual_seed(self.seed)
        size = (self.batch, self.heads, self.slots)
        centre = torch.randn(self.centres, self.head_dim, generator=rng)
        k = centre[torch.randint(0, self.centres, size, generator=rng)]
        k = k + self.spread * torch.randn(k.shape, generator=rng)
        if self.zeros:
            k[torch.rand(size, generator=rng) < 0.2] = 0
        offsets = torch.randint(0, self.slots, size[:1], generator=rng) * int(self.shifted)
        room = self.slots - offsets[:, None].expand(size[:2])
        lengths = (torch.rand(size[:2], generator=rng) * (room + 1)).long()
        lengths[0, 0] = room[0, 0]
        rank = torch.arange(self.slots) - offsets[:, None, None]
        k = k.masked_fill(~((rank >= 0) & (rank < lengths[..., None]))[..., None], torch.nan)
        if self.tokens_first:
            k = k.transpose(1, 2).contiguous().transpose(1, 2)
        where = {"dtype": torch.int32, "device": kind["device"]}
        shift = offsets.to(**where) if self.shifted else None
        return {"k": k.to(**kind), "lengths": lengths.to(**where), "offsets": shift}


CASES = st.builds(
    Clusters,
    batch=st.integers(1, 2),
    heads=st.integers(1, 2),
    slots=st.sampled_from(SLOTS),
    head_dim=st.sampled_from((16, 16, 64, 80)),
    centres=st.sampled_from((1, 3, 40)),
    spread=st.sampled_from((0.0, 0.6, 2.0)),
    zeros=st.booleans(),
    shifted=st.booleans(),
    tokens_first=st.booleans(),
    dtype=st.integers(0, 2),
    seed=st.integers(0, 2**16),
)
THRESHOLDS = st.sampled_from((0.5, 0.0, 0.9, -0.3))


def run(implementation: str, t: dict[str, Any], threshold: float) -> tuple[Tensor, Tensor]:
    reference = implementation == "reference"
    function = nearest_duplicate_reference if reference else nearest_duplicate_triton
    last, cosine = function(threshold=threshold, **t)
    return last.cpu(), cosine.cpu()


def head_keys(t: dict[str, Any], b: int, h: int) -> Tensor:
    """The keys of one head, float64 [n, D]."""
    first = 0 if t["offsets"] is None else int(t["offsets"][b])
    return t["k"][b, h, first : first + int(t["lengths"][b, h])].cpu().double()


def cosines(k: Tensor) -> Tensor:
    """float64 [n, n], the diagonal 0."""
    norm = k.norm(dim=-1)
    cos = (k @ k.T) / (norm[:, None] * norm[None, :])
    return cos.nan_to_num(0.0).fill_diagonal_(0.0)


def heads_of(t: dict[str, Any]) -> list[tuple[int, int]]:
    return [(b, h) for b in range(t["k"].shape[0]) for h in range(t["k"].shape[1])]


def check(implementation: str, case: Clusters, threshold: float) -> None:
    """j* is the last one over the threshold, give or take what lies within rounding of it."""
    t = case.tensors(implementation)
    last, cosine = run(implementation, t, threshold)
    assert last.dtype == torch.int32 and cosine.dtype == torch.float32
    for b, h in heads_of(t):
        cos = cosines(head_keys(t, b, h))
        n = len(cos)
        assert (last[b, h, n:] == -1).all() and (cosine[b, h, n:] == 0).all()
        ban = torch.eye(n, dtype=torch.bool)
        for slack, at_least in ((1e-5, True), (-1e-5, False)):
            over = (cos > threshold + slack) & ~ban
            bound = torch.where(over, torch.arange(n), -1).amax(-1) if n else torch.zeros(0)
            fine = last[b, h, :n] >= bound if at_least else last[b, h, :n] <= bound
            assert fine.all()
        for i, j in enumerate(last[b, h, :n].tolist()):
            expected = float(cos[i, j]) if j >= 0 else 0.0
            assert float(cosine[b, h, i]) == pytest.approx(expected, abs=2e-6)
            assert j < 0 or expected > threshold - 1e-5


@everywhere
@given(case=CASES, threshold=THRESHOLDS)
def test_the_last_duplicate(implementation: str, case: Clusters, threshold: float) -> None:
    check(implementation, case, threshold)


@everywhere
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [0, 1])
def test_every_head_dim(implementation: str, head_dim: int, dtype: int) -> None:
    check(implementation, Clusters(head_dim=head_dim, dtype=dtype, shifted=True), 0.5)


@everywhere
def test_the_last_of_equals_is_pointed_at(implementation: str) -> None:
    """Equal keys all point at the last, the last at the one before it, over several blocks."""
    case = Clusters(batch=1, heads=1, slots=200, centres=1, spread=0.0)
    last, cosine = run(implementation, case.tensors(implementation), 0.5)
    assert last.flatten().tolist() == [199] * 199 + [198]
    torch.testing.assert_close(cosine, torch.ones_like(cosine))


@everywhere
def test_threshold_is_strict_and_nobody_may_qualify(implementation: str) -> None:
    k = torch.eye(8, device=device_of(implementation))[None, None, :5]
    lengths = torch.tensor([[5]], dtype=torch.int32, device=k.device)
    t = {"k": k, "lengths": lengths, "offsets": None}
    assert (run(implementation, t, 0.0)[0] == -1).all()
    assert run(implementation, t, -0.5)[0].flatten().tolist() == [4, 4, 4, 4, 3]


def similarity(implementation: str, t: dict[str, Any], threshold: float) -> Tensor:
    """key_similarity over the duplicates that an implementation finds."""
    with pytest.MonkeyPatch.context() as patch:
        if implementation == "interpreter":
            patch.setattr(module, "nearest_duplicate", nearest_duplicate_triton)
        return key_similarity(t["k"], t["lengths"], threshold, offsets=t["offsets"]).cpu()


@everywhere
def test_golden_redundancy_of_rkv(implementation: str) -> None:
    """eviction.md 20.3, the row with the index-0 bug of the official code fixed."""
    k = torch.zeros(1, 1, 8, 8, device=device_of(implementation))
    k[..., :4] = torch.tensor(GOLDEN_KEYS, dtype=torch.float32)
    lengths = torch.tensor([[8]], dtype=torch.int32, device=k.device)
    r = similarity(implementation, {"k": k, "lengths": lengths, "offsets": None}, 0.5)
    torch.testing.assert_close(r.flatten(), torch.tensor(GOLDEN_R), atol=6e-5, rtol=0)


@everywhere
@given(case=CASES, threshold=THRESHOLDS)
def test_redundancy_is_a_column_mean(implementation: str, case: Clusters, threshold: float) -> None:
    """Zero one entry a row of the cosine matrix, average the columns, softmax: the n x n way."""
    t = case.tensors(implementation)
    r = similarity(implementation, t, threshold)
    last, _ = run(implementation, t, threshold)
    assert r.dtype == torch.float32
    for b, h in heads_of(t):
        cos = cosines(head_keys(t, b, h))
        n = len(cos)
        for i, j in enumerate(last[b, h, :n].tolist()):
            if j >= 0:
                cos[i, j] = 0
        truth = torch.softmax(cos.mean(0), 0) if n else cos.sum(0)
        torch.testing.assert_close(r[b, h, :n].double(), truth, rtol=2e-5, atol=1e-7)
        assert (r[b, h, n:] == 0).all()


@pytest.mark.parametrize("shifted", [False, True])
def test_chunks_add_nothing(shifted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    t = Clusters(slots=70, shifted=shifted).tensors("reference")
    whole = key_similarity(threshold=0.5, **t)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(key_similarity(threshold=0.5, **t), whole)


@everywhere
def test_lengths_may_be_expanded(implementation: str) -> None:
    """A prompt's length is one number a row, whatever the heads."""
    t = Clusters().tensors(implementation)
    t["k"] = t["k"].nan_to_num(0.0)
    lengths = torch.tensor([[20], [7]], dtype=torch.int32, device=t["k"].device).expand(-1, 2)
    last, _ = run(implementation, t | {"lengths": lengths}, 0.5)
    assert torch.equal(last, run(implementation, t | {"lengths": lengths.clone()}, 0.5)[0])


@everywhere
def test_no_slots(implementation: str) -> None:
    k = torch.zeros(2, 1, 0, 16, device=device_of(implementation))
    lengths = torch.zeros(2, 1, dtype=torch.int32, device=k.device)
    last, cosine = run(implementation, {"k": k, "lengths": lengths, "offsets": None}, 0.5)
    assert last.shape == cosine.shape == (2, 1, 0)


@pytest.mark.gpu
def test_waits_for_nothing_and_repeats() -> None:
    """Between two replays of a step: no sync with the host, the same bits each time."""
    t = Clusters(slots=300, head_dim=128, tokens_first=True, shifted=True).tensors("gpu")
    first = key_similarity(threshold=0.5, **t)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = key_similarity(threshold=0.5, **t)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, again)


def test_what_does_not_fit_is_refused() -> None:
    t = Clusters().tensors("reference")
    with pytest.raises(ValueError, match=r"expected threshold in \[-1, 1\], got 2"):
        nearest_duplicate(threshold=2, **t)
    with pytest.raises(ValueError, match="expected lengths of dtype"):
        nearest_duplicate(t["k"], t["lengths"].long(), 0.5)
    with pytest.raises(ValueError, match="expected offsets of shape"):
        nearest_duplicate(t["k"], t["lengths"], 0.5, offsets=t["lengths"])
    with pytest.raises(ValueError, match="expected k of shape"):
        nearest_duplicate(t["k"][0], t["lengths"], 0.5)
