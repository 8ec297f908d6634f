"""Shrinking a pool: free pages go back to the device, tokens stay what they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsekv.cache.paged import PagedKVCache
from sparsekv.cache.pages import PagePool


@pytest.mark.parametrize("kv_dtype", [None, "fp8_e4m3"])
def test_shrinking_moves_no_token(kv_dtype):
    pool = PagePool(torch.device("cpu"), torch.float32, 16, 16, kv_dtype, bounds=True)
    cache, layers, all_of_them = PagedKVCache(pool, 2, 1, 2), np.arange(2), np.ones(2, dtype=bool)
    cache.ensure(layers, np.full((2, 1, 2), 40), all_of_them)
    k = torch.randn(2, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    slots = torch.arange(40, dtype=torch.int32).expand(1, 2, -1)
    for layer in range(2):
        cache.append(layer, k[layer], -k[layer], slots, slots)
        cache.set_lens(layer, torch.full((1, 2), 40), np.full((1, 2), 40))
    keep = torch.zeros(1, 2, 40, dtype=torch.bool)
    keep[..., 35:] = True
    cache.compact(0, keep, None)
    cache.trim(0)
    order = torch.arange(40).expand(1, 2, -1)
    before = [cache.gather(0, order[..., :5]), cache.gather(1, order)]
    assert pool.pages_free == 4
    cache.shrink()
    cache.validate()
    assert (pool.pages_free, pool.num_pages) == (0, 8)
    assert {len(x) for x in pool.page_tensors.values()} == {9}
    after = [cache.gather(0, order[..., :5]), cache.gather(1, order)]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[0], new[0]) and torch.equal(old[1], new[1])
    assert cache.view(0, "positions")[0, 0, :5].sort().values.tolist() == list(range(35, 40))
    cache.ensure(layers, np.full((2, 1, 2), 30), all_of_them)
    cache.validate()
