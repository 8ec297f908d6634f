"""Where vLLM's CPU kernel puts keys inside a block, found by asking it."""

from __future__ import annotations

import pytest
import torch
from engines import needs_vllm

pytestmark = needs_vllm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("block_size", "head_dim"), [(32, 64), (256, 64), (512, 64), (32, 512)])
def test_keys_come_back_as_they_were_written(dtype, block_size, head_dim) -> None:
    """Blocks of more tokens, and heads of more channels, than bfloat16 has whole numbers."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    from sparsekv.vllm.cpu_cache import PackedBlocks

    if not current_platform.is_cpu():
        pytest.skip("needs vLLM's CPU build")
    access = PackedBlocks("vec", dtype, block_size, head_dim)
    cache = torch.zeros(3, 2, block_size, 2 * head_dim, dtype=dtype)
    halves = cache.view(3, 2, block_size * 2, head_dim).chunk(2, dim=2)
    keys, values = (torch.randn(block_size, 2, head_dim).to(dtype) for _ in range(2))
    slots = torch.arange(block_size) + 2 * block_size
    ops.cpu_attn_reshape_and_cache(
        keys, values, *halves, slots, "vec", k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
    assert torch.equal(access.keys(cache, torch.tensor([2])), keys)
    chosen = torch.randperm(block_size)[None, None].expand(1, 2, -1)
    access.move(cache, torch.full_like(chosen, 2), chosen, torch.tensor([[1]]))
    assert torch.equal(access.keys(cache, torch.tensor([1])), keys[chosen[0, 0]])
    assert torch.equal(halves[1][1], values[chosen[0, 0]].transpose(0, 1))
