"""Cuts on a GPU: all sparse layers of a layout at once, by a handful of launches a step.

Nothing waits for the device. `pinning` does the same layer by layer, in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekv.kernels._cut_layers import PagedCuts
from sparsekv.kernels.cut_scores import cut_scores, sum_scores
from sparsekv.kernels.pin_slots import pin_slots
from sparsekv.kernels.topk import MAX_TILE, MIN_TILE, select_topk
from sparsekv.policies.base import pool_columns
from sparsekv.vllm.compaction import Scorer
from sparsekv.vllm.layout import Ints, Layout
from sparsekv.vllm.rows import Step

# Candidates for which `select_topk` has kernels of their own; beyond the last, another one.
TILES = (0, *(MIN_TILE << i for i in range((MAX_TILE // MIN_TILE).bit_length())), 2 * MAX_TILE)
MAX_SCORES = 1 << 24  # of all layers and requests that are cut at a time; one request may have more


class Cutter:
    """Cuts layers of one layout; layers: vLLM's, each with its `impl` and `kv_cache`."""

    def __init__(self, layout: Layout, scorer: Scorer, layers: Sequence[Any]) -> None:
        self.layout, self.scorer, self.layers = layout, scorer, layers
        self.warm = False

    def cut(self, step: Step, tables: Sequence[Tensor]) -> None:
        """Cut what `step` moves; tables: int32 [B, M] each, the blocks of the layers' requests."""
        moving = step.moving
        if not len(moving):
            return
        impls, caches = [x.impl for x in self.layers], [x.kv_cache for x in self.layers]
        others = [impl.ring if self.scorer.rows else impl.sums for impl in impls]
        pinned = self.layout.pinned_blocks
        parts = (step.slots, step.computed, step.before, step.now)
        requests = np.stack([moving, *(part[moving] for part in parts)]).astype(np.int64)
        each = len(caches) * caches[0].shape[1] * self.layout.block_size
        for some in batches(pinned + requests[4] - requests[3], MAX_SCORES // each):
            part = torch.from_numpy(requests[:, some])
            cuts = PagedCuts.of(caches, tables, others, part, pinned)
            cut_all(cuts, self.scorer, impls[0].scale, impls[0].logits_soft_cap or None)

    def warm_up(self, longest: int) -> None:
        """Have every kernel compiled that cuts of prompts of up to `longest` tokens will need.

        By cuts of a request whose blocks are all vLLM's null block, which holds nothing.
        """
        self.warm = True
        pinned, size, rows = self.layout.pinned_blocks, self.layout.block_size, self.scorer.rows
        device = self.layers[0].kv_cache.device
        most = max(pinned + 1, longest // size)
        first = np.zeros(1, dtype=np.int64)
        for blocks in sorted({min(max(pinned + 1, tile // size), most) for tile in TILES}):
            table = torch.zeros(1, blocks + rows, dtype=torch.int32, device=device)
            computed, now = np.array([blocks * size + rows]), np.array([blocks])
            step = Step(first, np.array([0, 1]), computed, np.array([pinned]), now)
            self.cut(step, [table] * len(self.layers))


def batches(blocks: Ints, most: int) -> list[slice]:
    """Stretches of requests that, each as long as the longest, have at most `most` blocks of
    candidates; at least one request each."""
    found, start = [], 0
    for end in range(1, len(blocks) + 1):
        wanted = int(blocks[start : end + 1].max()) * (end + 1 - start)
        if end == len(blocks) or wanted > most:
            found.append(slice(start, end))
            start = end
    return found


def cut_all(cuts: PagedCuts, scorer: Scorer, scale: float, softcap: float | None) -> None:
    """Score, choose and move, in every layer; see `compaction` for what is chosen."""
    if scorer.rows:
        reduction = "sum" if scorer.group == "layer_mean" else scorer.group
        scores = cut_scores(cuts, softmax_scale=scale, softcap=softcap, reduction=reduction)
        if scorer.group == "layer_mean":
            scores = scores.sum(2, keepdim=True)  # the mean times HQ: the order is the same
    else:
        scores = sum_scores(cuts)
    layers, requests, heads, width = scores.shape
    lengths = cuts.candidates()[None, :, None].expand(layers, -1, heads)
    pooled = pool_columns(scores.flatten(0, 1), scorer.kernel, scorer.pool, lengths.flatten(0, 1))
    keep = cuts.pinned * cuts.caches[0].shape[2]
    index, _ = select_topk(pooled.reshape(-1, width), lengths.flatten(), keep)
    pin_slots(cuts, index.view(layers, requests, heads, keep), with_sums=not scorer.rows)
