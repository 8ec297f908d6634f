"""What layers note of their engine as they are built; an engine that was told something else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engines import needs_vllm

from sparsekv.vllm.settings import Settings

pytestmark = needs_vllm

SETTINGS = Settings("snapkv", 512, 2)
TOLD = ["full_attention"] * 2 + ["sliding_attention"] * 4


@pytest.fixture
def built() -> Any:
    from sparsekv.vllm import built

    return built


def test_a_chunk_may_have_all_of_a_step(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM drops its threshold for a lone request, which would wait for ever in a smaller pool."""
    config = SimpleNamespace(
        additional_config={"sparsekv": {"policy": "snapkv", "budget": 512, "full_layers": 2}},
        cache_config=SimpleNamespace(block_size=32),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(num_hidden_layers=6, layer_types=TOLD)
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=1024, long_prefill_token_threshold=64
        ),
    )
    monkeypatch.setattr(built, "check", lambda *_: None)
    for name in ("settings", "block_size", "chunk"):
        monkeypatch.setattr(built.Built, name, getattr(built.Built, name))
    built.Built.note(config)
    assert (built.Built.block_size, built.Built.chunk) == (32, 1024)


@pytest.mark.parametrize("layer_types", [None, ["full_attention"] * 6, TOLD[::-1], TOLD[1:]])
def test_layers_that_were_told_otherwise(built: Any, layer_types: list[str] | None) -> None:
    """Overrides in place of ours leave layers dense, or make other layers sparse."""
    told = SimpleNamespace(num_hidden_layers=6, layer_types=TOLD)
    built._check_layers(told, SETTINGS)
    told.layer_types = layer_types
    with pytest.raises(ValueError, match="2 full and 4 sparse layers"):
        built._check_layers(told, SETTINGS)
