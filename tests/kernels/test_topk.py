"""select_topk: the reference against a plain sort, the kernels against the reference, bit by bit.

Each test of a kernel runs both ways: one program a row, and rows split over programs. Under the
interpreter a split row of 600 slots has four segments, a sample of 64 slots, room for 64 candidates
and a bracket of one standard deviation, so that every case of the threshold is met.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekv.kernels import _topk_split, topk
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
    if name == "trend":  # the best slots are the last ones: all in one segment
        return torch.arange(shape[1]) + x
    if name == "special":
        special = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.nan])
        return torch.where(odd < 0.5, special[(odd * 8).long().clamp(max=3)], x)
    return x


NAMES = ("normal", "equal", "ties", "zeros", "near", "tiny", "trend", "special")


def problem_of(seed, name, slots, share, per_row, rows=ROWS):
    """(scores, seqlens, k, protected): ragged rows, k inside, at and beyond the edges."""
    gen = torch.Generator().manual_seed(seed)
    part = torch.rand(rows, 2, generator=gen)
    part[:3, 0] = torch.tensor([0.0, 1.0, 1.0])  # one empty row, two full ones
    seqlens = (part[:, 0] * slots).ceil().to(torch.int32)
    k = (part[:, 1] * seqlens.clamp(min=5) * 1.2).floor().to(torch.int32)
    scores = values(name, (rows, slots), gen)
    protected = None if share is None else torch.rand(rows, slots, generator=gen) < share
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


def whole(*args, **kwargs):
    """One program a row; the tests' rows are short."""
    return select_topk_triton(*args, **kwargs)


def split(*args, **kwargs):
    """Rows split over programs, however short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk, "MAX_TILE", 0)
        return select_topk_triton(*args, **kwargs)


def check(kernel, scores, seqlens, k, protected=None, max_k=None):
    """`kernel` gives what the reference does, bit by bit."""
    scores, seqlens, k, protected = on_device(scores, seqlens, k, protected)
    index, count = kernel(scores, seqlens, k, protected=protected, max_k=max_k)
    want, want_count = select_topk_reference(scores, seqlens, k, protected=protected, max_k=max_k)
    assert torch.equal(index, want) and torch.equal(count, want_count)


both_kernels = pytest.mark.parametrize("kernel", [whole, split])
all_ways = pytest.mark.parametrize("run", [select_topk_reference, whole, split])


@settings(max_examples=200)
@given(problems)
def test_reference_is_a_sort(problem):
    scores, seqlens, k, protected = problem
    index, count = select_topk_reference(scores, seqlens, k, protected=protected)
    assert index.shape == (len(scores), k if isinstance(k, int) else scores.shape[1])
    assert unpack(index, count) == sorted_slots(*problem)


@both_kernels
@settings(max_examples=40)
@given(problem=problems, max_k=st.none() | st.integers(0, 300))
def test_kernel_equals_reference(kernel, problem, max_k):
    check(kernel, *problem, max_k)


@both_kernels
@pytest.mark.parametrize("slots", [5, 257, 600])
@pytest.mark.parametrize("name", NAMES)
def test_kernel_on_each_distribution(kernel, name, slots):
    """The grid that hypothesis may miss; ties and NaN across segments included."""
    scores, seqlens, k, protected = problem_of(slots, name, slots, 0.05, per_row=True)
    for marked in (None, protected):
        check(kernel, scores, seqlens, k, marked)


@both_kernels
@pytest.mark.parametrize("k", [0, 1, 299, 300])
def test_edges_of_the_quota(kernel, k):
    """Nothing, one slot, all but one, all; equal scores, so that every slot is a tie."""
    scores = torch.zeros(2, 300)
    scores[1] = torch.arange(300) % 2  # the segments share both values
    check(kernel, scores, torch.tensor([300, 297], dtype=torch.int32), k)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter's sizes meet every case")
def test_every_case_of_the_threshold(monkeypatch):
    """The split kernel's cases all occur in rows like these, so none goes untested."""
    seen = set()

    class Spy:
        def __getitem__(self, grid):
            return self.launch

        def launch(self, *args, **options):
            _, seqlens, k_rows, _, _, counts, *_ = args
            kernel[(len(seqlens),)](*args, **options)
            sums = counts.sum(1).tolist()
            listed = (counts[..., 2] - counts[..., 1]).clamp(min=0)
            chunks = (-(-listed // options["CHUNK"])).sum(1).tolist()
            lens = seqlens.tolist()
            for n, c, fit, (gt_hi, ge_hi, gt_lo, ge_lo) in zip(
                lens, k_rows.tolist(), chunks, sums, strict=True
            ):
                c = min(n, c)
                if gt_hi <= c <= ge_hi:
                    seen.add("hi")
                elif gt_lo < c <= ge_lo:
                    seen.add("lo")
                elif ge_hi < c <= gt_lo:
                    fits = fit <= options["TILE"] // options["CHUNK"]
                    seen.add("between" if fits else "too many")
                else:
                    seen.add("missed")

    kernel = _topk_split.select_kernel
    monkeypatch.setattr(_topk_split, "select_kernel", Spy())
    for name in ("normal", "ties", "trend"):
        check(split, *problem_of(1, name, 900, 0.05, per_row=True))
    assert seen == {"hi", "lo", "between", "too many", "missed"}


@pytest.mark.parametrize("rows, slots", [(1, 16385), (8, 32768), (64, 131072), (3, 2_000_000)])
def test_plan_covers_the_row(rows, slots):
    """Segments cover a row once, none is empty, and the candidates expected of it fit."""
    plan = _topk_split.plan_of(rows, slots, "sm90")
    length = plan.blocks * plan.sizes.block
    assert (plan.segments - 1) * length < slots <= plan.segments * length
    assert plan.segments <= min(plan.sizes.segments, plan.segs) and plan.sample <= slots
    between = plan.sizes.margin * plan.sample**-0.5 * slots  # half of the row is kept
    assert slots > 524288 or between + plan.segments * plan.sizes.chunk / 2 < plan.tile


@pytest.mark.parametrize("name", ["normal", "ties", "trend", "special"])
def test_shipped_sizes(monkeypatch, name):
    """Rows of more than MAX_TILE slots with the blocks of a GPU, under the interpreter too."""
    monkeypatch.setitem(_topk_split._SIZES, "cpu", _topk_split._SIZES["sm90"])
    check(select_topk_triton, *problem_of(7, name, 40000, 0.01, per_row=True))


@pytest.mark.gpu
@pytest.mark.parametrize("margin", [4.5, 0.0], ids=["sampled", "missed"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows, slots", [(3, 4096), (3, 16384), (8, 32000), (64, 131072)])
def test_long_rows(monkeypatch, margin, name, rows, slots):
    """The shipped sizes; a bracket without a margin often misses and the row itself is bisected."""
    for arch, sizes in _topk_split._SIZES.items():
        monkeypatch.setitem(_topk_split._SIZES, arch, sizes._replace(margin=margin))
    for share in (None, 0.01):
        for per_row in (False, True):
            check(select_topk_triton, *problem_of(slots, name, slots, share, per_row, rows))


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
    for run in (select_topk_reference, whole, split):
        got = run(*on_device(poisoned, seqlens, k), protected=on_device(marked)[0])
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))


@all_ways
def test_values_of_torch_topk(run):
    """Long rows of distinct values: the kept values are torch.topk's."""
    scores = torch.randn(2, 5000, generator=torch.Generator().manual_seed(1))
    seqlens = torch.full((2,), 5000, dtype=torch.int32)
    index, _ = run(*on_device(scores, seqlens), 777)
    kept = scores.gather(1, index.cpu().long()).sort(descending=True).values
    assert torch.equal(kept, scores.topk(777).values)
    assert (index.diff() > 0).all()


@all_ways
def test_strides(run):
    """Views: every second slot, and rows of a wider tensor."""
    wide = torch.randn(3, 400, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    mask = wide > 1
    seqlens = torch.tensor([100, 7, 60], dtype=torch.int32, device=DEVICE)
    for cut in ((slice(None), slice(None, 200, 2)), (slice(None), slice(17, 117))):
        got = run(wide[cut], seqlens, 20, protected=mask[cut])
        want = run(wide[cut].contiguous(), seqlens, 20, protected=mask[cut].contiguous())
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@all_ways
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
