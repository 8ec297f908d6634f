"""Running sums without vLLM: a few requests in plain blocks that they give back and take again,
against sums and choices made token by token. Prompts come in chunks, with decode steps beside."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparsekv.kernels.column_scores import column_scores_triton
from sparsekv.kernels.cut_scores import sum_scores_triton
from sparsekv.kernels.paged_sums import add_attention_triton
from sparsekv.kernels.pin_slots import pin_slots_triton
from sparsekv.kernels.prefill import prefill_triton
from sparsekv.kernels.topk import select_topk_triton
from sparsekv.vllm.compaction import Scorer, cuts
from sparsekv.vllm.cutting import Cutter
from sparsekv.vllm.layout import Layout
from sparsekv.vllm.plain_cache import PlainBlocks
from sparsekv.vllm.rows import Tracker, shorten
from sparsekv.vllm.sums import Adder, apply_sums, provide_sums

HK, G, D, SIZE = 2, 2, 16, 16
SCALE = D**-0.5
LAYOUT = Layout(SIZE, 2, 24, False)
KERNELS = {
    "prefill_attention": prefill_triton,
    "column_scores": column_scores_triton,
    "select_topk": select_topk_triton,
}


class Request:
    """What an evictor that never frees knows of a request."""

    def __init__(self, prompt: int) -> None:
        self.prompt, self.tokens = prompt, torch.zeros(0, HK, 2 * D)
        self.held = [torch.arange(0)] * HK
        self.sums = torch.zeros(HK, 0)
        self.blocks: list[int] = []

    def cut(self) -> None:
        computed, pinned = len(self.tokens), LAYOUT.pinned_blocks * SIZE
        edge = max(pinned, (computed - LAYOUT.recent) // SIZE * SIZE)
        for head, held in enumerate(list(self.held)):
            old = held[held < edge]
            if len(old) > pinned:
                order = sorted(old.tolist(), key=lambda j: (float(self.sums[head, j]), j))
                best = torch.tensor(sorted(order[-pinned:]))
                self.held[head] = torch.cat([best, held[held >= edge]])

    def read(self, new: torch.Tensor, query: torch.Tensor) -> None:
        """New tokens [T, HK, 2 D] and their queries [T, HQ, D], one after the other."""
        for token, q in zip(new, query, strict=True):
            self.tokens = torch.cat([self.tokens, token[None]])
            self.sums = torch.nn.functional.pad(self.sums, (0, 1))
            for head in range(HK):
                last = torch.tensor([len(self.tokens) - 1])
                self.held[head] = torch.cat([self.held[head], last])
                keys = self.tokens[self.held[head], head, :D]
                p = (q[head * G : head * G + G] @ keys.T * SCALE).softmax(-1).mean(0)
                self.sums[head, self.held[head]] += p


class Server:
    """Blocks of one layer; single: as on a GPU, decode steps and cuts by kernels of their own."""

    def __init__(self, single: bool) -> None:
        self.single, self.gen = single, torch.Generator().manual_seed(0)
        self.tracker, self.scorer = Tracker(LAYOUT, 3), Scorer(0, "mean")
        self.layer = SimpleNamespace(
            kv_cache=torch.zeros(24, SIZE, HK, 2 * D).transpose(1, 2),
            impl=SimpleNamespace(sums=None, sums_at=None, scale=SCALE, logits_soft_cap=0),
        )
        self.cutter = Cutter(LAYOUT, self.scorer, [self.layer])
        self.free = torch.randperm(23, generator=self.gen).add(1).tolist()
        self.running: list[Request] = []

    def step(self, counts: list[int]) -> None:
        """The next tokens of each running request; all of them move on."""
        before = [len(r.tokens) for r in self.running]
        start = torch.tensor([0, *counts]).cumsum(0).int()
        lengths = torch.tensor([b + c for b, c in zip(before, counts, strict=True)]).int()
        for r, n in zip(self.running, lengths.tolist(), strict=True):
            while len(r.blocks) * SIZE < n:
                r.blocks.append(self.free.pop())
        common = SimpleNamespace(
            num_reqs=len(counts), query_start_loc_cpu=start, seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths, block_table_tensor=self._table(),
            is_prefilling=torch.tensor(
                [b < r.prompt for b, r in zip(before, self.running, strict=True)]
            ),
        )  # fmt: skip
        step = self.tracker.step(common)
        provide_sums(["layer"], {"layer": self.layer})
        cache, sums = self.layer.kv_cache, self.layer.impl.sums
        if self.single:
            self.cutter.cut(step, [common.block_table_tensor])
        else:
            for cut in cuts(step, LAYOUT, common.block_table_tensor, 0):
                apply_sums(cut, cache, sums, PlainBlocks(), LAYOUT)
        for r, b in zip(self.running, before, strict=True):
            if b >= r.prompt:
                r.cut()
        new = torch.randn(int(start[-1]), HK, 2 * D, generator=self.gen)
        query = torch.randn(int(start[-1]), HK * G, D, generator=self.gen) * 2
        for i, (r, b) in enumerate(zip(self.running, before, strict=True)):
            part = slice(int(start[i]), int(start[i + 1]))
            for t, token in enumerate(new[part], b):
                cache[r.blocks[t // SIZE], :, t % SIZE] = token
            r.read(new[part], query[part])
        table, held = shorten(step, LAYOUT, common)
        self._add(step, query, table, held)
        self._check(table, held)
        self._give_back(step)

    def _table(self) -> torch.Tensor:
        width = max(len(r.blocks) for r in self.running)
        return torch.tensor([r.blocks + [0] * (width - len(r.blocks)) for r in self.running]).int()

    def _add(self, step, query, table, held) -> None:
        cache, rows = self.layer.kv_cache, np.arange(len(step.slots))
        if self.single:
            rows = np.flatnonzero(np.diff(step.query_start) > 1)
            add_attention_triton(
                query, cache[..., :D], self.layer.impl.sums,
                torch.from_numpy(step.query_start).int(), held,
                torch.from_numpy(step.slots).int(), table, softmax_scale=SCALE,
            )  # fmt: skip
        parts = (rows, step.query_start, held.numpy().astype(np.int64), table, SIZE)
        adder = Adder(*parts, PlainBlocks(), self.scorer)
        adder.add(query, cache, self.layer.impl)

    def _check(self, table, held) -> None:
        """Tokens and sums in what the shortened table shows are those of the token-wise choice."""
        for row, r in enumerate(self.running):
            for head in range(HK):
                positions, n = r.held[head], int(held[row])
                seen = self.layer.kv_cache[table[row].long(), head].flatten(0, 1)[:n]
                assert torch.equal(seen, r.tokens[positions, head])
                sums = self.layer.impl.sums[table[row].long(), head].flatten()[:n]
                torch.testing.assert_close(sums, r.sums[head, positions], rtol=1e-5, atol=1e-5)

    def _give_back(self, step) -> None:
        """Blocks that no longer count go to whoever comes next, with what they hold."""
        for r, now in zip(self.running, step.now.tolist(), strict=True):
            for i in range(LAYOUT.pinned_blocks, now):
                if r.blocks[i]:
                    self.free.append(r.blocks[i])
                    r.blocks[i] = 0

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        self.free += [b for b in request.blocks if b]


@pytest.mark.parametrize("single", [False, True], ids=["cpu", "gpu"])
def test_sums_and_choices(single: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsekv.vllm.sums.MAX_TOKENS", 100)  # readings in parts, too
    for name, run in KERNELS.items() if single else ():
        monkeypatch.setattr(f"sparsekv.vllm.sums.{name}", run)
    monkeypatch.setattr("sparsekv.vllm.cutting.sum_scores", sum_scores_triton)
    monkeypatch.setattr("sparsekv.vllm.cutting.pin_slots", pin_slots_triton)
    server = Server(single)
    first, second, third = Request(100), Request(45), Request(130)
    server.running = [first, second]
    server.step([60, 45])
    server.step([39, 1])
    server.step([1, 1])  # a chunk of one token, attended in full
    for _ in range(20):
        server.step([1, 1])
    server.finish(second)
    server.running.append(third)  # in blocks that others had
    server.step([1, 80])
    server.step([1, 50])
    for _ in range(20):
        server.step([1, 1])


def test_layers_of_one_cache_share_their_sums() -> None:
    cache, other = torch.zeros(2, 8, HK, SIZE, 2 * D)
    layers = {
        name: SimpleNamespace(kv_cache=c, impl=SimpleNamespace(sums=None, sums_at=None))
        for name, c in {"a": cache, "b": cache, "c": other}.items()
    }
    provide_sums(["a", "b"], layers)
    provide_sums(["c"], layers)
    sums = {name: layer.impl.sums for name, layer in layers.items()}
    assert sums["a"] is sums["b"] and sums["c"] is not sums["a"]
    assert sums["a"].shape == (8, HK, SIZE)
    provide_sums(["a"], layers)
    assert layers["a"].impl.sums is sums["a"]
    layers["a"].kv_cache = torch.zeros(9, HK, SIZE, 2 * D)
    provide_sums(["a"], layers)
    assert len(layers["a"].impl.sums) == 9
