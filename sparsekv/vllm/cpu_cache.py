"""Keys and values inside a KV cache block of vLLM's CPU backend.

A block is [HK, block_size keys, then block_size values, D]. Values stand in order; keys are packed
for the instruction set in use, in a way that is the kernel's own. It is found by asking: numbers
are written through vLLM's op, and where they come out is the order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import _custom_ops as ops


def key_order(isa: str, dtype: torch.dtype, block_size: int, head_dim: int) -> Tensor:
    """Place of key number (token, channel) among the block_size * D of a head, int64 [size * D]."""
    token = torch.arange(block_size)[:, None].expand(-1, head_dim)
    channel = torch.arange(head_dim)[None, :].expand(block_size, -1)
    found = [_written(isa, x.to(dtype), block_size) for x in (token, channel)]  # exact up to 256
    number = found[0].long() * head_dim + found[1].long()
    order = torch.empty_like(number)
    order[number] = torch.arange(len(number))
    if not torch.equal(number.sort().values, torch.arange(len(number))):
        raise ValueError(f"expected keys that stay inside their block, got another layout ({isa})")
    return order


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


def read(cache: Tensor, blocks: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """(keys, values), each [len(blocks) * block_size, HK, D], of cache [N, HK, block_size, 2 D]."""
    keys, values = _halves(cache)
    found = keys[blocks].flatten(2)[:, :, order]  # [m, HK, block_size * D]
    shape = values[blocks].shape
    return _tokens(found.view(shape)), _tokens(values[blocks])


def write(cache: Tensor, blocks: Tensor, order: Tensor, keys: Tensor, values: Tensor) -> None:
    """The reverse of `read`, in place."""
    key_cache, value_cache = _halves(cache)
    size = key_cache.shape[2]
    flat = _blocks(keys, size).flatten(2)
    packed = torch.empty_like(flat)
    packed[:, :, order] = flat
    key_cache[blocks] = packed.view(-1, *key_cache.shape[1:])
    value_cache[blocks] = _blocks(values, size)


def _halves(cache: Tensor) -> tuple[Tensor, Tensor]:
    blocks, heads, size, _ = cache.shape
    keys, values = cache.view(blocks, heads, size * 2, -1).chunk(2, dim=2)
    return keys, values


def _tokens(blocks: Tensor) -> Tensor:
    return blocks.transpose(1, 2).flatten(0, 1)


def _blocks(tokens: Tensor, size: int) -> Tensor:
    return tokens.unflatten(0, (-1, size)).transpose(1, 2)
