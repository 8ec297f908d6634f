"""Models that cannot be served are refused by `patch` with the reason, and left as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from families import build, tiny
from rig import Loop, greedy, prompt
from torch import nn
from transformers import PreTrainedModel

import sparsekv

_LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
_TEXT = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def t5() -> PreTrainedModel:
    config = transformers.T5Config(
        vocab_size=128, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4
    )
    return transformers.T5ForConditionalGeneration(config)


def deepseek() -> PreTrainedModel:
    grouped = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    return tiny("DeepseekV3Config", **_LATENT, **_EXPERTS, **grouped)


def llama4() -> PreTrainedModel:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64}
    return tiny("Llama4TextConfig", attention_chunk_size=16, **experts)


def qwen3_next() -> PreTrainedModel:
    shared = {"num_experts": 4, "shared_expert_intermediate_size": 32}
    return tiny("Qwen3NextConfig", **_EXPERTS, **shared)


def mamba() -> PreTrainedModel:
    config = transformers.MambaConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, state_size=8
    )
    return transformers.MambaForCausalLM(config)


def gemma3n() -> PreTrainedModel:  # B67
    return tiny(
        "Gemma3nTextConfig",
        num_kv_shared_layers=2, layer_types=["full_attention"] * 4, vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=16, laurel_rank=8, altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip


def gemma3_vision() -> PreTrainedModel:
    config = transformers.Gemma3Config(
        text_config={**_TEXT, "sliding_window": 24}, vision_config=_VISION, mm_tokens_per_image=4
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def llava() -> PreTrainedModel:
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**_TEXT),
        vision_config=transformers.CLIPVisionConfig(**_VISION),
    )
    return transformers.LlavaForConditionalGeneration(config)


def jetmoe() -> PreTrainedModel:
    """Its attention repeats K and V after the cache returned them."""
    return tiny("JetMoeConfig", num_local_experts=2, num_experts_per_tok=2, kv_channels=16)


def moshi() -> PreTrainedModel:
    """Its config has a sliding window that its attention does not apply to a prompt."""
    config = transformers.MoshiConfig(**_TEXT, sliding_window=24, ffn_dim=64)
    return transformers.MoshiForCausalLM(config)


def bloom() -> PreTrainedModel:
    """ALiBi, in attention code of its own."""
    config = transformers.BloomConfig(vocab_size=128, hidden_size=64, n_layer=2, n_head=4)
    return transformers.BloomForCausalLM(config)


def roberta() -> PreTrainedModel:
    """A decoder head on layers that look ahead."""
    return tiny("RobertaConfig", is_decoder=False)


def bert() -> PreTrainedModel:
    return transformers.BertLMHeadModel(transformers.BertConfig(**_TEXT, is_decoder=True))


def backbone() -> PreTrainedModel:
    return transformers.LlamaModel(transformers.LlamaConfig(**_TEXT))


REASONS: dict[Any, str] = {
    t5: "expected a decoder-only model, got the encoder-decoder T5ForConditionalGeneration",
    deepseek: r"expected K and V in the cache, got latents \(kv_lora_rank\)",
    llama4: "expected full_attention and sliding_attention layers, got .*chunked_attention",
    qwen3_next: "expected full_attention and sliding_attention layers, got .*linear_attention",
    mamba: "expected full_attention and sliding_attention layers, got .*linear_attention",
    gemma3n: "expected every layer to have its own K and V, got KV sharing",
    gemma3_vision: "expected a text-only decoder, got Gemma3ForConditionalGeneration",
    llava: "expected a text-only decoder, got LlavaForConditionalGeneration",
    jetmoe: "expected the attention of JetMoeForCausalLM to use the K and V that the cache returns",
    moshi: "expected MoshiForCausalLM to apply the sliding window of its config",
    bloom: "expected a model whose attention function can be chosen, got BloomForCausalLM",
    roberta: "expected causal attention, got bidirectional attention",
    bert: "expected a causal language model that can generate, got BertLMHeadModel",
    backbone: "expected a causal language model that can generate, got LlamaModel",
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("make", REASONS, ids=lambda make: make.__name__)
def test_refused_with_reason(make: Any) -> None:
    torch.manual_seed(0)
    model = make()
    attention, members = model.config._attn_implementation, set(model.__dict__)
    training = model.training
    with pytest.raises(ValueError, match=REASONS[make]):
        sparsekv.patch(model, "snapkv", 24)
    assert model.config._attn_implementation == attention
    assert set(model.__dict__) == members, "the patch left something on the model"
    assert model.training == training
    with pytest.raises(ValueError, match=r"expected a model patched by sparsekv\.patch"):
        sparsekv.new_cache(model)


def test_refusal_leaves_generate_as_it_was() -> None:
    """A model that only the self-test refuses has been patched for a moment."""
    torch.manual_seed(0)
    model = jetmoe()
    before = greedy(model, prompt(20), 4)
    with pytest.raises(ValueError, match="JetMoe"):
        sparsekv.patch(model, "h2o", 24)
    after = greedy(model, prompt(20), 4)
    assert torch.equal(after.logits, before.logits)
    assert type(after.cache).__name__ == "DynamicCache"


def test_not_a_transformers_model() -> None:
    with pytest.raises(ValueError, match="expected a transformers PreTrainedModel, got Linear"):
        sparsekv.patch(nn.Linear(2, 2), "snapkv", 24)


def test_bad_budget_keeps_the_earlier_patch() -> None:
    """It is noticed before anything is touched."""
    model = sparsekv.patch(build("llama"), "h2o", 16)
    with pytest.raises(ValueError, match="expected a float budget in"):
        sparsekv.patch(model, "h2o", 1.5)
    run = greedy(model, prompt(40), 4)
    assert len(run.cache.kept_positions(0)) == 16


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"page_size": 16.0}, "expected page_size to be 16, 32 or 64, got 16.0"),
        ({"page_size": "16"}, "expected page_size to be 16, 32 or 64, got '16'"),
        ({"defer_eviction": "yes"}, "expected defer_eviction to be True or False, got 'yes'"),
        ({"defer_eviction": 1}, "expected defer_eviction to be True or False, got 1"),
    ],
)
def test_bad_options_leave_the_model_alone(option: dict[str, Any], reason: str) -> None:
    model = build("llama")
    with pytest.raises(ValueError, match=reason):
        sparsekv.patch(model, "h2o", 16, **option)
    with pytest.raises(ValueError, match=r"expected a model patched by sparsekv\.patch"):
        sparsekv.new_cache(model)


def test_kept_positions_of_no_layer_row_or_head() -> None:
    cache = greedy(sparsekv.patch(build("llama"), "h2o", 16), prompt(40), 4).cache
    for place, reason in (
        ({"layer": 99}, "expected a layer in 0 .. "),
        ({"row": 3}, "expected row below 1, got 3"),
        ({"row": -1}, "expected row >= 0, got -1"),
        ({"head": 9}, "expected head below 2, got 9"),
    ):
        with pytest.raises(ValueError, match=reason):
            cache.kept_positions(**({"layer": 0} | place))


def test_config_without_kv_heads() -> None:
    """GPT-2 has as many KV heads as heads and does not say so: served."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2,
        eos_token_id=None, bos_token_id=1,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    dense = greedy(model, prompt(40), 6)
    full = greedy(sparsekv.patch(model, "full"), prompt(40), 6)
    torch.testing.assert_close(full.logits, dense.logits, atol=1e-4, rtol=0)
    sparse = greedy(sparsekv.patch(model, "h2o", 16), prompt(40), 6)
    assert [len(sparse.cache.kept_positions(0, 0, head)) for head in range(4)] == [16] * 4


def test_rows_of_an_open_round_stay() -> None:
    """A rollback would put the rows of the snapshot into the place of others."""
    loop = Loop(sparsekv.patch(build("llama"), "h2o", 16))
    loop.cache.activate_past_recording()
    loop.feed(prompt(40))
    loop.feed(prompt(3, 1))
    with pytest.raises(ValueError, match=r"expected crop\(\) before rows change"):
        loop.cache.batch_repeat_interleave(2)
    loop.cache.crop(-1)
    loop.cache.batch_repeat_interleave(2)
    assert loop.cache.kept_positions(0, 1) == loop.cache.kept_positions(0, 0)
