"""Pyramid in tiers: their sizes, whose layer is whose, and how a backend comes to know."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from engines import needs_vllm
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.policies.budgets import pyramid_exact
from sparsekv.vllm.settings import KEY, Settings, parse
from sparsekv.vllm.tiers import padded, tier_blocks, tier_of


@given(
    mean=st.integers(4, 200),
    size=st.sampled_from([16, 32]),
    tiers=st.integers(2, 3),
    beta=st.integers(2, 30),
    each=st.integers(1, 12),
)
def test_tiers_are_the_ramp(mean, size, tiers, beta, each) -> None:
    """They conserve the budget, fall, and follow PyramidKV's layers, whose sums they have."""
    blocks = tier_blocks(mean, size, tiers, beta)
    assert sum(blocks) == tiers * mean and blocks == sorted(blocks, reverse=True)
    ramp = pyramid_exact(tiers * each, 10**9, mean * size, 0, beta)
    if each > 1:
        ends = ramp[:each], ramp[-each:]
        for found, part in zip((blocks[0], blocks[-1]), ends, strict=True):
            # A layer's own depth against the middle of a part: at most half a layer's step.
            step = (ramp[0] - ramp[-1]) / (len(ramp) - 1)
            assert abs(found * size - sum(part) / each) <= size + step / 2 + 1


def test_a_tier_without_a_block() -> None:
    with pytest.raises(ValueError, match="at least one pinned block in each of 3 tiers"):
        tier_blocks(1, 32, 3, 20)


def test_layers_of_tiers() -> None:
    assert [tier_of(layer, 30, 3, 3) for layer in (3, 11, 12, 20, 21, 29)] == [0, 0, 1, 1, 2, 2]
    assert tier_of(31, 32, 3, 1) == 0
    with pytest.raises(ValueError, match="got 29: full_layers=2 or 5 would do"):
        tier_of(31, 32, 3, 3)
    with pytest.raises(ValueError, match="fewer tiers"):
        tier_of(2, 3, 1, 4)


def test_padding() -> None:
    assert padded([3, 9, 9, 9]) == [3, 9, 9, 9]
    assert padded([4, 14, 14]) == [4, 16, 16]
    assert padded([9, 10]) == [10, 10]
    assert padded([30]) == [30]


def test_layouts() -> None:
    settings = parse({KEY: {"policy": "pyramid", "budget": 1024, "options": {"tiers": 2}}})
    assert [t.pinned_blocks for t in settings.layouts(32)] == [46, 16]
    assert {(t.recent, t.grows) for t in settings.layouts(32)} == {(32, True)}
    assert settings.method.window == settings.rows == 8


def config(settings: Settings, names: list[str]) -> SimpleNamespace:
    entry = {"policy": settings.policy, "budget": settings.budget}
    layers = {n: SimpleNamespace(impl=object(), attn_backend=None) for n in names}
    return SimpleNamespace(
        additional_config={KEY: entry},
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=6)),
    )


@needs_vllm
def test_a_backend_knows_its_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    from sparsekv.vllm.built import Built, know_tier, settings_of
    from sparsekv.vllm.gpu import SparseFlashBackend

    settings = Settings("pyramid", 512)
    names = [f"model.layers.{i}.self_attn.attn" for i in range(3, 6)]
    made = config(settings, names)
    layers = made.compilation_config.static_forward_context
    monkeypatch.setattr(Built, "settings", settings)
    monkeypatch.setattr(Built, "block_size", 32)
    plain = SlidingWindowSpec(
        block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float16, sliding_window=32
    )
    with pytest.raises(ValueError, match="know their tier"):
        SparseFlashBackend.customize_spec(plain)
    specs = []
    for layer in layers.values():
        know_tier(layer.impl, SparseFlashBackend, made)
        assert issubclass(layer.attn_backend, SparseFlashBackend)
        specs.append(layer.attn_backend.customize_spec(plain))
    assert [s.layout for s in specs] == list(settings.layouts(32))
    assert len({layer.attn_backend.full_cls_name() for layer in layers.values()}) == 3
    assert settings_of(specs[1], names[1:2], made) == settings
    with pytest.raises(ValueError, match=r"expected model\.layers\.5"):
        settings_of(specs[1], names[1:3], made)


@needs_vllm
def test_tiers_are_groups_without_a_full_layer() -> None:
    """vLLM puts windows of one length into one group, which then holds what its largest tier does.

    Alike in all but one thing: two groups; in everything: one.
    """
    from dataclasses import replace

    import torch
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    from sparsekv.vllm.register import register
    from sparsekv.vllm.spec import PinnedWindowSpec

    register()
    one = PinnedWindowSpec(
        block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32,
        sliding_window=32, pinned_tokens=64, grows=True, chunk=0,
    )  # fmt: skip

    def groups(*specs: PinnedWindowSpec) -> list[list[str]]:
        made = SimpleNamespace(
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
            cache_config=SimpleNamespace(
                get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False)
            ),
            speculative_config=None,
        )
        layers = {f"layers.{i}": spec for i, spec in enumerate(specs)}
        return [group.layer_names for group in get_kv_cache_groups(made, layers)]

    assert groups(one, one, one) == [["layers.0", "layers.1", "layers.2"]]
    for other in (
        replace(one, pinned_tokens=96), replace(one, grows=False), replace(one, chunk=512),
        replace(one, sliding_window=64),
    ):  # fmt: skip
        assert groups(one, other) == [["layers.0"], ["layers.1"]]
    assert len(groups(*(replace(one, pinned_tokens=32 * n) for n in (4, 3, 2, 1)))) == 4
