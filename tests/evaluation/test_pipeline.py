"""transformers' text-generation pipeline over a patched model: single, batched and chat input."""

from __future__ import annotations

import pytest
import torch
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import sparsekv
from sparsekv.policies import get_policy

TEXT = "Each word of this text is short, and there are many of them. " * 3
NEW = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder, num_hidden_layers=3, initializer_range=0.25)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer


@pytest.fixture(params=["full", "snapkv", "h2o", "kvzip"])
def patched(request, parts):
    """(pipeline, generate by hand) of a patched model."""
    model, tokenizer = parts
    chosen = get_policy(request.param).with_tokenizer(tokenizer)
    sparsekv.patch(model, policy=chosen, budget=40)

    def by_hand(prompt):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **NEW)[0, ids.shape[1] :]
        return tokenizer.decode(out, skip_special_tokens=True)

    yield pipeline("text-generation", model=model, tokenizer=tokenizer), by_hand
    sparsekv.unpatch(model)


def test_one_prompt(patched):
    pipe, by_hand = patched
    (output,) = pipe(TEXT, return_full_text=False, **NEW)
    assert output["generated_text"] == by_hand(TEXT)


def test_a_batch_of_prompts(patched):
    pipe, by_hand = patched
    prompts = [TEXT, TEXT[:50], TEXT[9:]]
    outputs = pipe(prompts, batch_size=3, return_full_text=False, **NEW)
    assert [output["generated_text"] for (output,) in outputs] == [by_hand(p) for p in prompts]


def test_chats(patched, parts):
    pipe, by_hand = patched
    chats = [[{"role": "user", "content": text}] for text in (TEXT, TEXT[:70])]
    expected = [by_hand(f"<u>{chat[0]['content']}<a>") for chat in chats]
    (output,) = pipe(chats[0], **NEW)
    assert output["generated_text"][-1] == {"role": "assistant", "content": expected[0]}
    outputs = pipe(chats, batch_size=2, **NEW)
    assert [output["generated_text"][-1]["content"] for (output,) in outputs] == expected


def test_the_cache_is_sparse(parts):
    """A pipeline hands no cache out, so its bytes are seen where they are made."""
    model, tokenizer = parts
    sparsekv.patch(model, policy="snapkv", budget=40)
    pipe, caches = pipeline("text-generation", model=model, tokenizer=tokenizer), []
    original = type(model).generate

    def generate(*args, **kwargs):
        output = original(model, *args, **kwargs, return_dict_in_generate=True)
        caches.append(sparsekv.hf.compat.output_cache(output))
        return output.sequences

    model.generate = generate
    try:
        pipe(TEXT, **NEW)
    finally:
        del model.generate
        sparsekv.unpatch(model)
    assert caches[0].report().kept.max < 60 < len(tokenizer(TEXT)["input_ids"])
