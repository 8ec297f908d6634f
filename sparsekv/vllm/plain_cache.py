"""Keys and values inside a KV cache block whose parts stand in order: vLLM's GPU backends."""

from __future__ import annotations

import torch
from torch import Tensor


class PlainBlocks:
    """`BlockAccess` to a cache [N, HK, block_size, 2 D], any strides: keys, then values."""

    def keys(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """The keys of blocks [m], in order, [m * block_size, HK, D]."""
        return cache[..., : cache.shape[-1] // 2][blocks].transpose(1, 2).flatten(0, 1)

    def move(self, cache: Tensor, blocks: Tensor, offsets: Tensor, target: Tensor) -> None:
        """Copy K tokens a head, at blocks and offsets [M, HK, K], into blocks target [M, P]."""
        heads = torch.arange(cache.shape[1], device=cache.device)[:, None]
        kept = cache[blocks, heads, offsets]  # [M, HK, K, 2 D]
        cache[target] = kept.unflatten(2, (target.shape[1], cache.shape[2])).transpose(1, 2)
