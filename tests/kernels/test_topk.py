"""select_topk: the reference against a plain sort, the kernel against the reference, bit by bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekv.kernels.topk import select_topk, select_topk_reference, select_topk_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 5
BLOCKS = (1, 2, 31, 255, 256, 257, 600)  # around one step of the interpreter's configuration


def values(name: str, shape: tuple[int, int], gen: torch.Generator) -> torch.Tensor:
    """Scores of one of the distributions that break top-k codes."""
    x = torch.randn(shape, generator=gen)
    odd = torch.rand(shape, generator=gen)
    if name == "equal":
        return torch.full(shape, -1.5)
    if name == "ties":
        return (2 * x).round()
    if name == "zeros":
        return torch.where(odd < 0.3, -0.0, torch.where(odd < 0.6, 0.0, x))
    if name == "near":  # differ in the last mantissa bits only: every radix pass is needed
        return (1.0 + (odd * 8).floor() * 2.0**-23) * torch.where(x > 1, -1.0, 1.0)
    if name == "tiny":  # subnormal numbers
        return x * 1e-40
    if name == "special":
        special = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.nan])
        return torch.where(odd < 0.5, special[(odd * 8).long().clamp(max=3)], x)
    return x


NAMES = ("normal", "equal", "ties", "zeros", "near", "tiny", "special")


def problem_of(seed, name, slots, share, per_row):
    """(scores, seqlens, k, protected): ragged rows, k inside, at and beyond the edges."""
    gen = torch.Generator().manual_seed(seed)
    part = torch.rand(ROWS, 2, generator=gen)
    part[:3, 0] = torch.tensor([0.0, 1.0, 1.0])  # one empty row, two full ones
    seqlens = (part[:, 0] * slots).ceil().to(torch.int32)
    k = (part[:, 1] * seqlens.clamp(min=5) * 1.2).floor().to(torch.int32)
    scores = values(name, (ROWS, slots), gen)
    protected = None if share is None else torch.rand(ROWS, slots, generator=gen) < share
    return scores, seqlens, k if per_row else int(k[1]), protected


# A seed decides the lengths and quotas: drawn one by one they are mostly 0, 1 and S.
problems = st.builds(
    problem_of,
    seed=st.integers(0, 2**31),
    name=st.sampled_from(NAMES),
    slots=st.sampled_from(BLOCKS) | st.integers(1, 300),
    share=st.sampled_from([None, 0.0, 0.1, 0.9]),
    per_row=st.booleans(),
)


def sorted_slots(scores, seqlens, k, protected):
    """Plain Python: sort (y, slot) tuples of each row."""
    out = []
    for r, row in enumerate(scores.tolist()):
        y = [(0, -math.inf if math.isnan(x) else x) for x in row]
        if protected is not None:
            y = [(1, 0.0) if p else x for p, x in zip(protected[r].tolist(), y, strict=True)]
        order = sorted(range(int(seqlens[r])), key=lambda i: (y[i], i), reverse=True)
        out.append(sorted(order[: int(k if isinstance(k, int) else k[r])]))
    return out


def unpack(index, count):
    """Lists of kept slots; checks dtypes and the -1 padding."""
    assert index.dtype == count.dtype == torch.int32
    assert all((row[c:] == -1).all() for row, c in zip(index, count.tolist(), strict=True))
    return [row[:c].tolist() for row, c in zip(index, count.tolist(), strict=True)]


def on_device(*args):
    return [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in args]


def run_triton(scores, seqlens, k, protected=None, max_k=None):
    scores, seqlens, k, protected = on_device(scores, seqlens, k, protected)
    index, count = select_topk_triton(scores, seqlens, k, protected=protected, max_k=max_k)
    return index.cpu(), count.cpu()


@settings(max_examples=200)
@given(problems)
def test_reference_is_a_sort(problem):
    scores, seqlens, k, protected = problem
    index, count = select_topk_reference(scores, seqlens, k, protected=protected)
    assert index.shape == (len(scores), k if isinstance(k, int) else scores.shape[1])
    assert unpack(index, count) == sorted_slots(*problem)


@settings(max_examples=40)
@given(problems, st.none() | st.integers(0, 300))
def test_kernel_equals_reference(problem, max_k):
    scores, seqlens, k, protected = problem
    index, count = run_triton(scores, seqlens, k, protected, max_k)
    want, want_count = select_topk_reference(scores, seqlens, k, protected=protected, max_k=max_k)
    assert torch.equal(index, want) and torch.equal(count, want_count)


@pytest.mark.parametrize("slots", [5, 257, 600])
@pytest.mark.parametrize("name", NAMES)
def test_kernel_on_each_distribution(name, slots):
    """The grid that hypothesis may miss; ties and NaN across the steps of a row included."""
    scores, seqlens, k, protected = problem_of(slots, name, slots, 0.05, per_row=True)
    for marked in (None, protected):
        index, count = run_triton(scores, seqlens, k, marked)
        want, want_count = select_topk_reference(scores, seqlens, k, protected=marked)
        assert torch.equal(index, want) and torch.equal(count, want_count)


@given(problems)
def test_larger_quota_keeps_a_superset(problem):
    scores, seqlens, k, protected = problem
    less = unpack(*select_topk(scores, seqlens, k, protected=protected))
    more = unpack(*select_topk(scores, seqlens, k + 1, protected=protected))
    assert all(set(a) <= set(b) for a, b in zip(less, more, strict=True))


@settings(max_examples=20)
@given(problems)
def test_padding_never_leaks(problem):
    scores, seqlens, k, protected = problem
    beyond = torch.arange(scores.shape[1]) >= seqlens[:, None]
    poisoned = scores.masked_fill(beyond, torch.inf)
    marked = None if protected is None else protected | beyond
    want = select_topk_reference(scores, seqlens, k, protected=protected)
    for run in (select_topk_reference, select_topk_triton):
        got = run(*on_device(poisoned, seqlens, k), protected=on_device(marked)[0])
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("run", [select_topk_reference, select_topk_triton])
def test_values_of_torch_topk(run):
    """Long rows of distinct values: the kept values are torch.topk's."""
    scores = torch.randn(2, 5000, generator=torch.Generator().manual_seed(1))
    seqlens = torch.full((2,), 5000, dtype=torch.int32)
    index, _ = run(*on_device(scores, seqlens), 777)
    kept = scores.gather(1, index.cpu().long()).sort(descending=True).values
    assert torch.equal(kept, scores.topk(777).values)
    assert (index.diff() > 0).all()


@pytest.mark.parametrize("run", [select_topk_reference, select_topk_triton])
def test_strides(run):
    """Views: every second slot, and rows of a wider tensor."""
    wide = torch.randn(3, 400, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    mask = wide > 1
    seqlens = torch.tensor([100, 7, 60], dtype=torch.int32, device=DEVICE)
    for cut in ((slice(None), slice(None, 200, 2)), (slice(None), slice(17, 117))):
        got = run(wide[cut], seqlens, 20, protected=mask[cut])
        want = run(wide[cut].contiguous(), seqlens, 20, protected=mask[cut].contiguous())
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("run", [select_topk_reference, select_topk_triton])
def test_protected_beyond_quota(run):
    """More protected slots than k: the newest protected ones stay, whatever they score."""
    scores = torch.tensor([[torch.inf, 9.0, 5.0, torch.nan, -9.0, 8.0]], device=DEVICE)
    protected = torch.tensor([[False, True, True, True, True, False]], device=DEVICE)
    seqlens = torch.tensor([6], dtype=torch.int32, device=DEVICE)
    assert run(scores, seqlens, 2, protected=protected)[0].tolist() == [[3, 4]]
    assert run(scores, seqlens, 5, protected=protected)[0].tolist() == [[0, 1, 2, 3, 4]]


def test_errors():
    scores, lens = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="expected k >= 0, got -1"):
        select_topk(scores, lens, -1)
    with pytest.raises(ValueError, match="expected max_k >= 0, got -2"):
        select_topk(scores, lens, lens, max_k=-2)
    with pytest.raises(ValueError, match="expected seqlens of dtype"):
        select_topk(scores, lens.long(), 1)
    with pytest.raises(ValueError, match="expected k of shape"):
        select_topk(scores, lens, lens[:1])
    with pytest.raises(ValueError, match="expected protected of shape"):
        select_topk(scores, lens, 1, protected=torch.zeros(2, 4, dtype=torch.bool))
