"""Paged decode on a CUDA device: accuracy in 16 bits, repeats, graph replay."""

from __future__ import annotations

import pytest
import torch
from decode_oracle import arguments, assert_close, assert_probs, oracle, queries, reduce_group
from paged_problems import DEVICE, make, same

from sparsekv.kernels.decode import paged_decode_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_gpu_repeats_bitwise(dtype: torch.dtype, head_dim: int) -> None:
    lens = ((0, 1, 700), (1023, 1024, 1025), (5000, 64, 3))
    cache = make(0, lens, D=head_dim, dtype=dtype)
    q = queries(0, cache, 4)
    options = {"softmax_scale": head_dim**-0.5, "probs": "mean"}
    first = paged_decode_attention(*arguments(q, cache), **options)
    want = oracle(q, cache, softmax_scale=head_dim**-0.5)
    assert_close(first, want, dtype)
    assert_probs(first[2], reduce_group(want[2], "mean", 3))
    for _ in range(20):
        again = paged_decode_attention(*arguments(q, cache), **options)
        assert all(same(a, b) for a, b in zip(first, again, strict=True))


def test_gpu_graph_replay_follows_the_lengths() -> None:
    """One captured graph serves every length, 0 included."""
    cache = make(0, ((600, 600), (600, 600)), D=64, dtype=torch.bfloat16)
    q, lens = queries(0, cache, 4), cache.lens.clone()
    args = (q, cache.k_pages, cache.v_pages, cache.block_table, lens)
    options = {"softmax_scale": 0.125, "probs": "sum", "chunk_size": 128}
    paged_decode_attention(*args, **options)  # compile before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = paged_decode_attention(*args, **options)
    for new in ([[0, 1], [127, 128]], [[129, 600], [600, 0]]):
        lens.copy_(torch.tensor(new))
        graph.replay()
        eager = paged_decode_attention(*args, **options)
        assert all(same(a, b) for a, b in zip(captured, eager, strict=True))
