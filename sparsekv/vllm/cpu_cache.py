"""Keys and values inside a KV cache block of vLLM's CPU backend.

A block is [HK, block_size keys, then block_size values, D]. Values stand in order; keys are packed
for the instruction set in use, in a way that is the kernel's own. It is found by asking: numbers
are written through vLLM's op, and where they come out is the order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import _custom_ops as ops


class PackedBlocks:
    """`BlockAccess` to the CPU backend's cache [N, HK, block_size, 2 D]."""

    def __init__(self, isa: str, dtype: torch.dtype, block_size: int, head_dim: int) -> None:
        self.order = key_order(isa, dtype, block_size, head_dim).view(block_size, head_dim)

    def keys(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """The keys of blocks [m], in order, [m * block_size, HK, D]."""
        packed = _halves(cache)[0][blocks].flatten(2)  # [m, HK, block_size * D]
        return packed[:, :, self.order].transpose(1, 2).flatten(0, 1)

    def move(self, cache: Tensor, blocks: Tensor, offsets: Tensor, target: Tensor) -> None:
        """Copy K tokens a head, at blocks and offsets [M, HK, K], into blocks target [M, P]."""
        keys, values = _halves(cache)
        heads = torch.arange(cache.shape[1])[:, None]
        kept_values = values[blocks, heads, offsets]  # [M, HK, K, D]
        flat = keys.flatten(2)
        kept_keys = flat[blocks[..., None], heads[..., None], self.order[offsets]]
        shape = (target.shape[1], cache.shape[2])
        values[target] = kept_values.unflatten(2, shape).transpose(1, 2)
        packed = torch.empty(*target.shape, *flat.shape[1:], dtype=flat.dtype)
        packed[..., self.order.flatten()] = kept_keys.unflatten(2, shape).transpose(1, 2).flatten(3)
        keys[target] = packed.view(*target.shape, *keys.shape[1:])


def key_order(isa: str, dtype: torch.dtype, block_size: int, head_dim: int) -> Tensor:
    """Place of key number (token, channel) among the block_size * D of a head, int64 [size * D]."""
    token = torch.arange(block_size)[:, None].expand(-1, head_dim)
    channel = torch.arange(head_dim)[None, :].expand(block_size, -1)
    # A byte at a time: bfloat16 has whole numbers up to 256 only.
    parts = (token // 256, token % 256, channel // 256, channel % 256)
    high_t, low_t, high_c, low_c = (_written(isa, x.to(dtype), block_size).long() for x in parts)
    number = (high_t * 256 + low_t) * head_dim + high_c * 256 + low_c
    if not torch.equal(number.sort().values, torch.arange(len(number))):
        raise ValueError(f"expected keys that stay inside their block, got another layout ({isa})")
    return number.argsort()


def _written(isa: str, keys: Tensor, block_size: int) -> Tensor:
    """What a block holds for keys [block_size, D] of one head, flat."""
    cache = torch.zeros((1, 1, block_size * 2, keys.shape[1]), dtype=keys.dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    one_head = keys[:, None].contiguous()
    slots = torch.arange(block_size)
    ops.cpu_attn_reshape_and_cache(
        one_head, one_head, key_cache, value_cache, slots, isa,
        k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto",
    )  # fmt: skip
    return key_cache.flatten()


def _halves(cache: Tensor) -> tuple[Tensor, Tensor]:
    blocks, heads, size, _ = cache.shape
    keys, values = cache.view(blocks, heads, size * 2, -1).chunk(2, dim=2)
    return keys, values
