"""The GPU builder without a GPU: what it tells FlashAttention, whose own part is left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engines import needs_vllm

pytestmark = needs_vllm


class Common(SimpleNamespace):
    """A CommonAttentionMetadata with the fields that are read."""

    def replace(self, **changes):
        return Common(**{**vars(self), **changes})


def common(lengths: list[int], counts: list[int], prefilling: list[bool], padded: int) -> Common:
    rows = len(lengths)
    start = torch.tensor([0, *counts, *[0] * padded]).cumsum(0).int()
    known = torch.tensor([*lengths, *[0] * padded], dtype=torch.int32)
    table = torch.arange(1, 41, dtype=torch.int32).repeat(rows + padded, 1)
    return Common(
        num_reqs=rows + padded, query_start_loc=start, query_start_loc_cpu=start,
        seq_lens=known, seq_lens_cpu_upper_bound=known, max_seq_len=max(lengths),
        max_query_len=max(counts), is_prefilling=torch.tensor([*prefilling, *[False] * padded]),
        block_table_tensor=table, req_idx=list(range(rows)),
    )  # fmt: skip


@pytest.fixture(params=[False])
def builder(monkeypatch, request):
    from sparsekv.vllm import gpu
    from sparsekv.vllm.layout import Layout
    from sparsekv.vllm.rows import Tracker

    def build(self, prefix, metadata, fast_build):
        return SimpleNamespace(common=metadata, sliding_window=(255, 0))

    monkeypatch.setattr(gpu.FlashAttentionMetadataBuilder, "build", build)
    made = object.__new__(gpu.SparseFlashBuilder)
    made._layout, made._scorer = Layout(16, 2, 64, False, request.param), None
    made._tracker = Tracker(made._layout, 4)
    made._lengths = torch.zeros(4, dtype=torch.int32)
    made._sent = torch.zeros(2, 4, dtype=torch.int32)
    made._table = None
    return made


def test_what_the_kernel_is_told(builder) -> None:
    builder.build(0, common([300, 20], [300, 20], [True, True], 0))
    metadata = builder.build(0, common([301, 21], [1, 1], [False, False], 1))
    first = (300 - 64) // 16
    told = metadata.common
    assert told.seq_lens.tolist() == [301 - (first - 2) * 16, 21, 0]
    assert told.block_table_tensor[0, :4].tolist() == [1, 2, first + 1, first + 2]
    assert told.block_table_tensor[1].tolist() == list(range(1, 41))
    assert told.max_seq_len == told.seq_lens.max() and metadata.sliding_window == (-1, -1)
    kept = metadata.sparsekv_kept
    assert kept.slots.tolist() == [0, 1, -1] and kept.lengths.tolist() == [301, 21, 0]


def test_a_capture_and_its_replays_use_the_same_memory(builder) -> None:
    example = common([40, 40], [1, 1], [False, False], 0)
    captured = builder.build_for_cudagraph_capture(example)
    assert captured.common.seq_lens.tolist() == [40, 40]
    assert captured.sparsekv_kept.slots.tolist() == [-1, -1]
    builder.build(0, common([300, 20], [300, 20], [True, True], 0))
    later = builder.build(0, common([301, 21], [1, 1], [False, False], 0))
    for name in ("block_table_tensor", "seq_lens"):
        tensors = [getattr(m.common, name) for m in (captured, later)]
        assert tensors[0].data_ptr() == tensors[1].data_ptr()
    assert captured.sparsekv_kept.slots.tolist() == [0, 1]


def test_a_warm_up_leaves_no_trace(builder) -> None:
    builder.build(0, common([300], [300], [True], 0))
    builder.build(0, common([1, 1], [1, 1], [False, False], 0))
    assert builder._tracker.state.recent_from.tolist() == [0] * 4


@pytest.mark.parametrize("builder", [True], indirect=True)
def test_a_prompt_that_is_cut_while_it_is_read(builder) -> None:
    """The second chunk sees what the first one has left, and itself."""
    whole = builder.build(0, common([200, 20], [200, 20], [True, True], 0)).common
    assert whole.seq_lens.tolist() == [200, 20]
    told = builder.build(0, common([300, 21], [100, 1], [True, False], 1)).common
    first = (200 - 64) // 16
    assert told.seq_lens.tolist() == [300 - (first - 2) * 16, 21, 0]
    assert told.block_table_tensor[0, :4].tolist() == [1, 2, first + 1, first + 2]
    assert told.max_seq_len == told.seq_lens.max()
    told = builder.build(0, common([301], [1], [False], 0)).common
    assert told.seq_lens.tolist() == [301 - ((300 - 64) // 16 - 2) * 16]
    again = builder.build(0, common([100], [100], [True], 0)).common  # another request in its row
    assert again.seq_lens.tolist() == [100]
