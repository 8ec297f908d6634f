"""A random Llama and a byte-level tokenizer, saved as a user's model folder would be."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

CHAT = "{% for m in messages %}<u>{{ m['content'] }}{% endfor %}<a>"


def save_tiny_model(folder: Path, *, chat_template: str | None = CHAT, **config: object) -> Path:
    """2 layers, 4 query and 2 KV heads of 16; every byte is a token, then </s>, <u> and <a>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": ["<u>", "<a>"]})
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    set_seed(0)
    size = {"vocab_size": len(fast), "hidden_size": 64, "intermediate_size": 96}
    size |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    size |= {"eos_token_id": fast.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    LlamaForCausalLM(LlamaConfig(**(size | config))).save_pretrained(folder)
    return folder
