"""The GPU builder without a GPU: what it tells FlashAttention, whose own part is left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engines import needs_vllm

pytestmark = needs_vllm
H2O = {"policy": "h2o", "budget": 96, "recent": 64, "full_layers": 0}


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
        block_table_tensor=table, slot_mapping=None, req_idx=list(range(rows)),
    )  # fmt: skip


@pytest.fixture(params=[False])
def builder(monkeypatch, request):
    from sparsekv.vllm import gpu

    def build(self, prefix, metadata, fast_build):
        table = metadata.block_table_tensor
        return SimpleNamespace(
            common=metadata, sliding_window=(255, 0), block_table=table, slot_mapping=None
        )

    monkeypatch.setattr(gpu.FlashAttentionMetadataBuilder, "build", build)
    entry = {"policy": "streaming", "budget": 96, "recent": 64, "full_layers": 0}
    entry |= {"prefill": "chunked"} if request.param else {}
    return builder_of({"one": a_layer()}, entry)


def a_layer():
    impl = SimpleNamespace(sums=None, sums_at=None, scale=0.25, logits_soft_cap=0, together=None)
    return SimpleNamespace(impl=impl, kv_cache=torch.zeros(41, 2, 16, 32))


def builder_of(layers, entry, name="one"):
    """A builder of layer `name`, as FlashAttention's part would have left it."""
    from sparsekv.vllm import gpu
    from sparsekv.vllm.compaction import Scorer
    from sparsekv.vllm.plain_cache import PlainBlocks
    from sparsekv.vllm.settings import parse

    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context=layers, max_cudagraph_capture_size=4
        ),
        additional_config={"sparsekv": entry}, model_config=SimpleNamespace(max_model_len=600),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )  # fmt: skip
    settings = parse(config.additional_config)
    made = object.__new__(gpu.SparseFlashBuilder)
    made.vllm_config, made.layer_names, made.device = config, [name], "cpu"
    made._layout, made._scorer = settings.layout(16), Scorer.of(settings)
    made._access, made._together, made._table = PlainBlocks(), None, None
    return made


@pytest.fixture
def adding(builder):
    """The same for a policy of running sums."""
    return builder_of(builder._layers, H2O)


def test_what_the_kernel_is_told(builder) -> None:
    builder.build(0, common([300, 20], [300, 20], [True, True], 0))
    metadata = builder.build(0, common([301, 21], [1, 1], [False, False], 1))
    first = (300 - 64) // 16
    told = metadata.common
    assert told.seq_lens.tolist() == [301 - (first - 2) * 16, 21, 0]
    assert metadata.block_table[0, :4].tolist() == [1, 2, first + 1, first + 2]
    assert metadata.block_table[1].tolist() == list(range(1, 41))
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
    assert captured.common.seq_lens.data_ptr() == later.common.seq_lens.data_ptr()
    assert captured.block_table.data_ptr() == later.block_table.data_ptr()
    assert captured.sparsekv_kept.slots.tolist() == [0, 1]


def test_a_warm_up_leaves_no_trace(builder) -> None:
    builder.build(0, common([300], [300], [True], 0))
    builder.build(0, common([1, 1], [1, 1], [False, False], 0))
    assert builder._together.tracker.state.recent_from.tolist() == [0] * 4


@pytest.mark.parametrize("builder", [True], indirect=True)
def test_a_prompt_that_is_cut_while_it_is_read(builder) -> None:
    """The second chunk sees what the first one has left, and itself."""
    whole = builder.build(0, common([200, 20], [200, 20], [True, True], 0)).common
    assert whole.seq_lens.tolist() == [200, 20]
    metadata = builder.build(0, common([300, 21], [100, 1], [True, False], 1))
    told, first = metadata.common, (200 - 64) // 16
    assert told.seq_lens.tolist() == [300 - (first - 2) * 16, 21, 0]
    assert metadata.block_table[0, :4].tolist() == [1, 2, first + 1, first + 2]
    assert told.max_seq_len == told.seq_lens.max()
    told = builder.build(0, common([301], [1], [False], 0)).common
    assert told.seq_lens.tolist() == [301 - ((300 - 64) // 16 - 2) * 16]
    again = builder.build(0, common([100], [100], [True], 0)).common  # another request in its row
    assert again.seq_lens.tolist() == [100]


def test_prompts_are_read_and_single_queries_are_not(adding) -> None:
    first = adding.build(0, common([300, 20], [300, 20], [True, True], 0)).sparsekv_kept
    (reading,) = first.adder.readings
    assert reading.starts_q.tolist() == [0, 300, 320] and reading.used.tolist() == [300, 20]
    assert reading.held.tolist() == [*range(1, 20), 1, 2]
    mixed = adding.build(0, common([320, 21], [20, 1], [True, False], 1)).sparsekv_kept
    (reading,) = mixed.adder.readings
    assert reading.tokens.tolist() == list(range(20)) and reading.used.tolist() == [320]
    assert reading.older[-3:].tolist() == [16, 12, 0]  # 300 tokens were there
    assert mixed.held[:2].tolist() == [320, 21]
    last = adding.build(0, common([321, 22], [1, 1], [False, False], 1)).sparsekv_kept
    assert last.adder is None
    gone = (320 - 64) // 16 - 2
    assert last.held.tolist() == [321 - gone * 16, 22, 0]
    assert last.table[0, :3].tolist() == [1, 2, gone + 3]


def test_sums_are_there_before_a_capture(adding) -> None:
    example = common([40, 40], [1, 1], [False, False], 0)
    captured = adding.build_for_cudagraph_capture(example).sparsekv_kept
    layer = adding.vllm_config.compilation_config.static_forward_context["one"]
    sums = layer.impl.sums
    assert sums.shape == (41, 2, 16) and captured.adder is None
    assert adding._together.cutter.warm
    later = adding.build(0, common([40, 21], [1, 1], [False, False], 0)).sparsekv_kept
    assert layer.impl.sums is sums
    for name in ("table", "held", "slots"):
        assert getattr(captured, name).data_ptr() == getattr(later, name).data_ptr()


def test_a_layer_adds_up(adding, monkeypatch) -> None:
    """Prompts through readings, decode steps through the kernel: each token's sum is right."""
    from sparsekv.kernels.paged_sums import add_attention_triton
    from sparsekv.vllm import gpu

    monkeypatch.setattr(gpu, "add_attention", add_attention_triton)
    monkeypatch.setattr(gpu.FlashAttentionImpl, "forward", lambda self, *args, **kwargs: None)
    layer = adding.vllm_config.compilation_config.static_forward_context["one"]
    impl = object.__new__(gpu.SparseFlashImpl)
    impl.ring, impl.sums, impl.reduction, impl.together = None, None, "mean", None
    impl.scale, impl.logits_soft_cap, impl.head_size = 0.25, 0, 16
    layer.impl = impl
    layer.kv_cache.normal_()
    query = torch.randn(60, 4, 16)
    for step in (common([50], [50], [True], 1), common([51], [1], [False], 1)):
        metadata = adding.build(0, step)
        count = int(step.query_start_loc[1])
        used = query[:50] if count == 50 else query[50:]
        impl.forward(layer, used, None, None, layer.kv_cache, metadata, None)
    keys = layer.kv_cache[1:5].transpose(1, 2).flatten(0, 1)[:51, :, :16]  # blocks 1, 2, 3, 4
    x = torch.einsum("qhgd,khd->hgqk", query[:51].unflatten(1, (2, 2)), keys) * 0.25
    wanted = x.masked_fill(~torch.ones(51, 51, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    found = impl.sums[1:5].transpose(0, 1).flatten(1)[:, :51]
    torch.testing.assert_close(found, wanted.mean(1).sum(1), rtol=1e-5, atol=1e-5)


def test_groups_share_a_step(builder, monkeypatch) -> None:
    """The first says what the step asks for, the last has the layers of both cut."""
    from sparsekv.vllm.cutting import Cutter

    made = []
    monkeypatch.setattr(Cutter, "cut", lambda self, step, tables: made.append((step, tables)))
    layers = {"one": a_layer(), "two": a_layer()}
    one, two = (builder_of(layers, H2O, name) for name in layers)
    for length, count in ((300, 300), (301, 1)):
        made.clear()
        steps = [common([length], [count], [count > 1], 0) for _ in range(2)]
        steps[1].block_table_tensor = steps[1].block_table_tensor + 40
        steps[1].slot_mapping = torch.ones(1)
        first = one.build(0, steps[0])
        assert not made
        second = two.build(0, steps[1])
    ((step, tables),) = made
    assert step.moving.tolist() == [0] and two._together is one._together
    places = [(x.data_ptr(), x.shape) for x in tables]
    assert places == [(s.block_table_tensor.data_ptr(), s.block_table_tensor.shape) for s in steps]
    gone = (300 - 64) // 16
    assert first.block_table[0, :3].tolist() == [1, 2, gone + 1]
    assert second.block_table[0, :3].tolist() == [41, 42, gone + 41]
    assert first.common is second.common and second.slot_mapping is steps[1].slot_mapping
    assert second.sparsekv_kept.table is second.block_table


def test_groups_that_do_not_fit_together(builder) -> None:
    layers = {"one": a_layer(), "two": a_layer()}
    one, two = (builder_of(layers, H2O, name) for name in layers)
    step = common([300], [300], [True], 0)
    one.build(0, step)
    with pytest.raises(ValueError, match=r"once a step of 1 rows, got \['one'\]"):
        one.build(0, step)
    with pytest.raises(ValueError, match="with 2 rows"):
        two.build(0, common([300, 20], [300, 20], [True, True], 0))


def test_graphs_hold_no_prompts_whose_queries_are_added_up() -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    from sparsekv.vllm.gpu import SparseFlashBuilder

    def support(policy: str):
        entry = {"sparsekv": {"policy": policy, "budget": 512}}
        config = SimpleNamespace(additional_config=entry)
        return SparseFlashBuilder.get_cudagraph_support(config, None)

    assert support("h2o") == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert support("snapkv") == SparseFlashBuilder._cudagraph_support
