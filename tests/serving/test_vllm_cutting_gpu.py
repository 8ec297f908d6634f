"""On a GPU: cuts of many layers at once pin what the layer-by-layer path pins, in bf16."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparsekv.vllm.compaction import Scorer
from sparsekv.vllm.cutting import Cutter
from sparsekv.vllm.layout import Layout
from sparsekv.vllm.pinning import pin_best
from sparsekv.vllm.plain_cache import PlainBlocks
from sparsekv.vllm.rows import Step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LAYERS, HK, G, D, SIZE, R = 6, 8, 4, 128, 32, 32
LAYOUT = Layout(SIZE, 16, 512, False)
SCORERS = {
    "layersplit": Scorer(R, "mean"),
    "snapkv": Scorer(R, "mean", "max", 7),
    "tova": Scorer(1, "layer_mean"),
    "h2o": Scorer(0, "mean"),
}


def layers_of(scorer: Scorer, blocks: int, seed: int) -> dict[str, SimpleNamespace]:
    """Caches as FlashAttention has them, tokens before heads in memory; keys that differ in what
    they are given."""
    torch.manual_seed(seed)
    made = {}
    for i in range(LAYERS):
        cache = torch.randn(blocks, SIZE, HK, 2 * D, dtype=torch.bfloat16, device="cuda")
        ring = torch.randn(8, max(1, scorer.rows), HK * G, D, dtype=torch.bfloat16, device="cuda")
        sums = torch.rand(blocks, HK, SIZE, device="cuda")
        impl = SimpleNamespace(ring=ring, sums=sums, scale=D**-0.5, logits_soft_cap=0)
        made[f"layer {i}"] = SimpleNamespace(impl=impl, kv_cache=cache.transpose(1, 2))
    return made


def a_step(prompt_end: bool) -> Step:
    """Two requests after their prompts, or two that give up a block each while they decode."""
    lengths = np.array([4000, 2500])
    before = np.full(2, 16) if prompt_end else (lengths - 512) // SIZE - 1
    now = (lengths - 512) // SIZE
    start = np.array([0, 1, 2])
    return Step(np.array([3, 5]), start, lengths, before, now)


@pytest.mark.parametrize("policy", SCORERS)
@pytest.mark.parametrize("prompt_end", [True, False])
def test_what_is_pinned(policy: str, prompt_end: bool) -> None:
    scorer, step = SCORERS[policy], a_step(prompt_end)
    blocks = 2 * 130
    table = torch.randperm(blocks - 1, device="cuda")[: 2 * 129].view(2, 129).int() + 1
    together, single = (layers_of(scorer, blocks, 0) for _ in range(2))
    names = list(together)
    cutter, tables = Cutter(LAYOUT, scorer, list(together.values())), [table] * LAYERS
    cutter.cut(step, tables)
    for name in names:  # one after the other, each group has one layer
        pin_best(step, LAYOUT, table, scorer, PlainBlocks(), [name], single)
    for name in names:
        one, other = together[name].kv_cache, single[name].kv_cache
        pinned = set(table[:, : LAYOUT.pinned_blocks].flatten().tolist())
        others = [i for i in range(blocks) if i not in pinned]
        assert torch.equal(one[others], other[others])
        # A token whose score is another's up to rounding may be chosen for it.
        for request in range(2):
            for head in range(HK):
                where = table[request, : LAYOUT.pinned_blocks].long()
                kept = [
                    set(map(tuple, c[where, head].flatten(0, 1).tolist())) for c in (one, other)
                ]
                assert len(kept[0] & kept[1]) >= 0.99 * LAYOUT.pinned_blocks * SIZE
        if not scorer.rows:
            assert torch.equal(together[name].impl.sums, single[name].impl.sums)
    took(cutter, step, tables, f"{policy}, prompt's end {prompt_end}")


def took(cutter: Cutter, step: Step, tables: list[torch.Tensor], what: str) -> None:
    """Print how long a cut of LAYERS layers takes the device, and the host."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begun = time.perf_counter()
    start.record()
    for _ in range(20):
        cutter.cut(step, tables)
    end.record()
    host = (time.perf_counter() - begun) / 20
    torch.cuda.synchronize()
    device = start.elapsed_time(end) / 20
    print(f"{what}: {LAYERS} layers, host {host * 1e3:.3f} ms, device {device:.3f} ms")
