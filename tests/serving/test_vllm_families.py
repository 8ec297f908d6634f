"""Models that vLLM must be told more about: Qwen2 and Qwen3, which its own files build without
windows, through models of ours; Granite, whose windows it takes to have sinks. What is asked for
and refused, and tokens of tiny random ones beside those of the independent evictor."""

from __future__ import annotations

import functools

import pytest
import torch
from block_evictor import BlockEvictor, greedy
from engines import BLOCK, check_same, needs_vllm, run
from transformers import AutoModelForCausalLM, GraniteConfig, Qwen2Config, Qwen3Config

pytestmark = needs_vllm

FULL_LAYERS, NEW = 2, 40
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
# Small models tie their embeddings; Qwen3's heads are wider than their share of the hidden size.
CONFIGS = {
    "Qwen2ForCausalLM": functools.partial(Qwen2Config, **SHAPE, tie_word_embeddings=True),
    "Qwen3ForCausalLM": functools.partial(Qwen3Config, **SHAPE, head_dim=96),
    "GraniteForCausalLM": functools.partial(GraniteConfig, **SHAPE, attention_multiplier=0.2),
}
TOLD = {
    "Qwen2ForCausalLM": {"architectures": ["SparseQwen2ForCausalLM"]},
    "Qwen3ForCausalLM": {"architectures": ["SparseQwen3ForCausalLM"]},
    "GraniteForCausalLM": {"attention_sinks": False},
}
LENGTHS = (90, 700, 333)  # within the budget, read in chunks, between
# Settings, and the evictor's reading of them; 64 pinned and 64 recent tokens each.
CASES = {
    "streaming": ({"sinks": 64, "budget": 128}, {}),
    "layersplit": ({"budget": 128, "recent": 64}, {"rows": 32}),
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Random models; biases and norms, too, are random, and attention is far from even."""
    found = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config(), dtype=torch.float32)
        for key, weight in model.named_parameters():
            if weight.dim() == 1:
                torch.nn.init.normal_(weight, float("norm" in key), 0.3)
            elif "layers" in key:
                torch.nn.init.normal_(weight, 0, 2 / weight.shape[1] ** 0.5)
        found[name] = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(found[name])
    return found


def prompts() -> list[list[int]]:
    source = torch.Generator().manual_seed(1)
    return [torch.randint(SHAPE["vocab_size"], (n,), generator=source).tolist() for n in LENGTHS]


@pytest.mark.slow
@pytest.mark.parametrize("policy", CASES)
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_logprobs(name: str, policy: str, folders: dict[str, str]) -> None:
    settings, reading = CASES[policy]
    settings = {"policy": policy, "full_layers": FULL_LAYERS, **settings}
    got = run(folders[name], prompts(), NEW, settings, skip_tokenizer_init=True)
    assert got["leaked_blocks"] == 0 and got["left_behind"] == 0
    for row, prompt in enumerate(prompts()):
        evictor = BlockEvictor(FULL_LAYERS, BLOCK, 64, 64, **reading)
        tokens, logprobs = greedy(folders[name], prompt, NEW, evictor)
        check_same(got["answers"][str(row)], tokens, logprobs, row)
        dense = greedy(folders[name], prompt, NEW, None)[0]
        assert (dense != tokens) == (len(prompt) > 128), f"row {row} cannot fail"


@pytest.mark.parametrize("name", CONFIGS)
def test_what_vllm_is_told(name: str, tmp_path) -> None:
    from sparsekv.vllm import llm_kwargs

    CONFIGS[name](architectures=[name]).save_pretrained(tmp_path)
    got = llm_kwargs(str(tmp_path), policy="snapkv", budget=512, recent=256, full_layers=2)
    assert got["hf_overrides"] == {
        "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 4,
        "sliding_window": 256,
        **TOLD[name],
    }
    assert llm_kwargs(str(tmp_path), policy="full") == {"model": str(tmp_path)}


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"use_sliding_window": True, "max_window_layers": 3}, "full-attention layers"),
        ({"use_sliding_window": True, "max_window_layers": 6}, "full-attention layers"),
        ({"dual_chunk_attention_config": {"chunk_size": 64}}, "no dual chunk attention"),
    ],
)
def test_refused(name: str, changes: dict, match: str) -> None:
    from sparsekv.vllm.arguments import sparse_layers
    from sparsekv.vllm.settings import Settings

    config = CONFIGS[name](architectures=[name], **changes)
    with pytest.raises(ValueError, match=match):
        sparse_layers(config, Settings("snapkv", 512, 2))
