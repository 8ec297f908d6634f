"""Cuts without vLLM: what is pinned in plain blocks, against a choice made token by token."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparsekv.kernels.cut_scores import cut_scores_triton, sum_scores_triton
from sparsekv.kernels.pin_slots import pin_slots_triton
from sparsekv.vllm.compaction import Scorer, apply, cuts
from sparsekv.vllm.cutting import Cutter, batches
from sparsekv.vllm.layout import Layout
from sparsekv.vllm.plain_cache import PlainBlocks
from sparsekv.vllm.rows import Tracker, shorten, store_queries
from sparsekv.vllm.together import Together

HK, G, D, SIZE, R = 2, 2, 16, 16, 4
SCALE = D**-0.5


class Server:
    """A few requests that are read in chunks and then decoded, in blocks in any order."""

    def __init__(
        self, layout: Layout, scorer: Scorer, seed: int = 0, together: bool = False
    ) -> None:
        self.layout, self.scorer = layout, scorer
        self.gen = torch.Generator().manual_seed(seed)
        self.tracker = Tracker(layout, 4)
        # As FlashAttention has it: tokens before heads in memory.
        self.cache = torch.zeros(200, SIZE, HK, 2 * D).transpose(1, 2)
        self.ring = torch.zeros(4, scorer.rows, HK * G, D)
        self.table = torch.randperm(199, generator=self.gen)[: 3 * 40].view(3, 40).int() + 1
        self.tokens = [torch.zeros(0, HK, 2 * D) for _ in range(3)]
        self.queries = [torch.zeros(0, HK * G, D) for _ in range(3)]
        self.held = [[torch.arange(0)] * HK for _ in range(3)]
        impl = SimpleNamespace(ring=self.ring, scale=SCALE, logits_soft_cap=0)
        cutter = Cutter(layout, scorer, [SimpleNamespace(impl=impl, kv_cache=self.cache)])
        self.together = Together(layout, ["layer"], cutter, 4, 8, "cpu") if together else None
        self.shown = torch.zeros(8, 40, dtype=torch.int32)

    def step(self, counts: list[int], prompts: list[int]) -> None:
        rows = [i for i, c in enumerate(counts) if c]
        before = [len(self.tokens[i]) for i in rows]
        start = torch.tensor([0, *(counts[i] for i in rows)]).cumsum(0).int()
        lengths = torch.tensor([b + counts[i] for b, i in zip(before, rows, strict=True)]).int()
        common = SimpleNamespace(
            num_reqs=len(rows), query_start_loc_cpu=start, seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths, block_table_tensor=self.table[rows],
            is_prefilling=torch.tensor([b < prompts[i] for b, i in zip(before, rows, strict=True)]),
        )  # fmt: skip
        step, self.prompts = self._begin(common), prompts
        for i, b in zip(rows, before, strict=True):
            if b >= prompts[i] or (self.layout.chunked and b):
                self._cut(i, b)
        new = torch.randn(int(start[-1]), HK, 2 * D, generator=self.gen)
        query = torch.randn(int(start[-1]), HK * G, D, generator=self.gen)
        store_queries(query, self.ring, step)
        self._write(rows, before, counts, start, new, query)
        if self.together is None:
            self._check(rows, *shorten(step, self.layout, common))
        else:
            self._check(rows, self.shown, self.together.lengths)

    def _begin(self, common):
        if self.together is not None:
            assert self.together.enter(common, ["layer"], self.shown, True)
            return self.together.step
        step = self.tracker.step(common)
        for cut in cuts(step, self.layout, common.block_table_tensor, self.scorer.rows):
            apply(cut, self.cache, self.ring, PlainBlocks(), self.layout, self.scorer, SCALE, None)
        return step

    def _write(self, rows, before, counts, start, new, query) -> None:
        for n, (i, b) in enumerate(zip(rows, before, strict=True)):
            for t in range(counts[i]):
                block = self.table[i, (b + t) // SIZE]
                self.cache[block, :, (b + t) % SIZE] = new[int(start[n]) + t]
            part = slice(int(start[n]), int(start[n + 1]))
            self.tokens[i] = torch.cat([self.tokens[i], new[part]])
            self.queries[i] = torch.cat([self.queries[i], query[part]])
            fresh = torch.arange(b, b + counts[i])
            self.held[i] = [torch.cat([p, fresh]) for p in self.held[i]]

    def _check(self, rows, table, lengths) -> None:
        """What the shortened table shows is what the token-wise choice holds."""
        for n, i in enumerate(rows):
            seen = self.cache[table[n].long()].transpose(1, 2).flatten(0, 1)[: int(lengths[n])]
            for head in range(HK):
                assert torch.equal(seen[:, head], self.tokens[i][self.held[i][head], head])

    def _cut(self, i: int, computed: int) -> None:
        pinned = self.layout.pinned_blocks * SIZE
        end, rows = self.prompt_end(i, computed), self.scorer.rows
        edge = max(pinned, (end - self.layout.recent) // SIZE * SIZE)
        for head in range(HK):
            held = self.held[i][head]
            old = held[held < edge]
            if len(old) <= pinned:
                continue
            votes = torch.zeros(len(held))
            one_set = self.scorer.group == "layer_mean"
            every = range(HK * G) if one_set else range(head * G, head * G + G)
            for h in every:
                keys = self.tokens[i][held, h // G, :D]
                for q in range(computed - rows, computed):
                    x = keys @ self.queries[i][q, h] * SCALE
                    votes += x.masked_fill(held > q, -torch.inf).softmax(0) / len(every)
            half = self.scorer.kernel // 2
            votes = votes[: len(old)]
            pooled = [votes[max(0, j - half) : j + half + 1].max() for j in range(len(old))]
            order = sorted(range(len(old)), key=lambda j: (float(pooled[j]), j), reverse=True)
            kept = old[sorted(order[:pinned])]
            self.held[i][head] = torch.cat([kept, held[held >= edge]])

    def prompt_end(self, i: int, computed: int) -> int:
        if not self.layout.grows or computed < self.prompts[i]:
            return computed
        self.ends = getattr(self, "ends", {})
        return self.ends.setdefault(i, computed)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cut together is cut by kernels, as on a GPU."""
    for run in (cut_scores_triton, sum_scores_triton, pin_slots_triton):
        name = run.__name__.removesuffix("_triton")
        monkeypatch.setattr(f"sparsekv.vllm.cutting.{name}", run)


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize(
    "scorer",
    [Scorer(R, "mean", "max", 1), Scorer(R, "mean", "max", 5), Scorer(1, "layer_mean")],
    ids=["plain", "pooled", "tova"],
)
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("together", [False, True], ids=["cpu", "gpu"])
def test_pinned_tokens(grows: bool, scorer: Scorer, chunked: bool, together: bool) -> None:
    server = Server(Layout(SIZE, 2, 24, grows, chunked), scorer, together=together)
    prompts = [150, 40, 97]
    server.step([100, 40, 60], prompts)
    server.step([50, 1, 0], prompts)
    server.step([1, 1, 37], prompts)
    for _ in range(40):
        server.step([1, 1, 1], prompts)
    server.step([1, 0, 1], prompts)
    server.step([1, 1, 1], prompts)


@pytest.mark.parametrize("together", [False, True], ids=["cpu", "gpu"])
def test_many_tokens_are_cut_in_parts(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    monkeypatch.setattr("sparsekv.vllm.compaction.MAX_TOKENS", 64)
    monkeypatch.setattr("sparsekv.vllm.cutting.MAX_SCORES", 8 * HK * SIZE)
    layout = Layout(SIZE, 1, 16, False)
    server = Server(layout, Scorer(R, "mean", "max", 1), seed=1, together=together)
    server.step([90, 80, 70], [90, 80, 70])
    for _ in range(20):
        server.step([1, 1, 1], [90, 80, 70])


def test_batches() -> None:
    blocks = np.array([3, 1, 5, 2, 9, 1])
    assert batches(blocks, 10) == [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 6)]
    assert batches(blocks, 1000) == [slice(0, 6)]
    assert batches(blocks, 1) == [slice(i, i + 1) for i in range(6)]


def test_a_warm_up_leaves_all_blocks_alone() -> None:
    server = Server(Layout(SIZE, 2, 24, False), Scorer(R, "mean", "max", 5), together=True)
    server.cache.normal_()
    before = server.cache.clone()
    server.together.cutter.warm_up(300)
    assert torch.equal(server.cache[1:], before[1:])  # block 0 is none
    server.cache.zero_()
    server.step([100, 40, 60], [100, 40, 60])
    server.step([1, 1, 1], [100, 40, 60])
