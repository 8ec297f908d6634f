"""What generate() offers beyond greedy text of one row: every policy, or dense at full budget."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from rig import POLICIES, Loop, greedy, kept, left_padded, patched, prompt, tiny_llama
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

import sparsekv
from sparsekv.hf.compat import output_cache

PLENTY = 64  # a budget that nothing in this file reaches


@pytest.fixture
def batch():
    return left_padded(prompt(30), prompt(21, 1))


@pytest.mark.parametrize("policy", POLICIES)
def test_beams_with_padding_are_dense_at_full_budget(policy, model, batch):
    options = {
        "max_new_tokens": 8, "num_beams": 4, "num_return_sequences": 3, "do_sample": False,
        "return_dict_in_generate": True, "output_scores": True,
    }  # fmt: skip
    expected = model.generate(**batch, **options)
    got = patched(model, policy, PLENTY).generate(**batch, **options)
    assert got.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_sampling_is_dense_at_full_budget(policy, model, batch):
    """Three samples of each row with the same seed; the logits are warped, not only sorted."""
    options = {
        "max_new_tokens": 10, "do_sample": True, "num_return_sequences": 3, "temperature": 0.7,
        "top_k": 20, "top_p": 0.9,
    }  # fmt: skip
    torch.manual_seed(1)
    expected = model.generate(**batch, **options)
    torch.manual_seed(1)
    got = patched(model, policy, PLENTY).generate(**batch, **options)
    assert got.tolist() == expected.tolist()
    assert len({tuple(row) for row in got.tolist()}) == 6


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "layersplit"])
def test_returned_samples_are_rows_of_their_own(policy, model):
    """After eviction too: each of 3 samples is what its tokens give when fed alone."""
    patched(model, policy, 12)
    torch.manual_seed(1)
    output = model.generate(
        prompt(30), max_new_tokens=8, do_sample=True, num_return_sequences=3,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    assert len({tuple(row) for row in output.sequences.tolist()}) == 3
    for row in range(3):
        loop = Loop(model)
        alone = [loop.feed(prompt(30))[0, -1]]
        for token in output.sequences[row, 30:-1]:
            alone.append(loop.feed(token.view(1, 1))[0, -1])
        logits = torch.stack([step[row] for step in output.logits])
        torch.testing.assert_close(logits, torch.stack(alone), atol=1e-4, rtol=0)
        assert kept(output_cache(output), row) == loop.kept()


class Collector(BaseStreamer):
    """Remembers what it was given."""

    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.mark.parametrize("kwargs", [{}, {"prompt_lookup_num_tokens": 3}])
def test_streamer(kwargs, model):
    patched(model, "h2o", 12)
    plain = greedy(model, prompt(30))
    streamer = Collector()
    greedy(model, prompt(30), streamer=streamer, **kwargs)
    assert streamer.ended and streamer.tokens == plain.sequences[0].tolist()


def test_stop_at_eos(model):
    patched(model, "h2o", 12)
    plain = greedy(model, prompt(30))
    eos = int(plain.tokens[0, 5])
    run = greedy(model, prompt(30), eos_token_id=eos)
    stop = plain.tokens[0].tolist().index(eos)
    assert run.tokens[0].tolist() == plain.tokens[0, : stop + 1].tolist()
    assert run.cache.get_seq_length() == 30 + stop


def test_inputs_embeds(model):
    patched(model, "snapkv", 12)
    plain = greedy(model, prompt(30))
    embeddings = model.get_input_embeddings()(prompt(30))
    output = model.generate(inputs_embeds=embeddings, max_new_tokens=12, do_sample=False)
    assert output.tolist() == plain.tokens.tolist()


def test_three_threads_on_one_model(model):
    """No state on modules or globals: each thread gets the text it gets alone."""
    patched(model, "h2o", 12)
    jobs = [(prompt(20 + 9 * i, i), 12 + i) for i in range(3)]
    alone = [greedy(model, ids, new).tokens.tolist() for ids, new in jobs]
    got = [None] * 3

    def work(i):
        for _ in range(3):
            got[i] = greedy(model, *jobs[i]).tokens.tolist()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == alone


def test_two_models_two_policies(model):
    """Patching one model leaves another of the same class and weights alone."""
    other = tiny_llama()
    dense = greedy(other, prompt(30))
    patched(model, "streaming", 12)
    assert torch.equal(greedy(other, prompt(30)).logits, dense.logits)
    sparse = greedy(model, prompt(30))
    patched(other, "snapkv", 9)
    assert torch.equal(greedy(model, prompt(30)).logits, sparse.logits)
    assert greedy(other, prompt(30), 1).cache.report().kept.max == 9


def test_a_copied_model_keeps_its_own_patch(model):
    dense = greedy(model, prompt(30))
    patched(model, "h2o", 12)
    sparse = greedy(model, prompt(30))
    clone = copy.deepcopy(model)
    sparsekv.unpatch(model)
    assert torch.equal(greedy(model, prompt(30)).logits, dense.logits)
    assert torch.equal(greedy(clone, prompt(30)).logits, sparse.logits)
    sparsekv.unpatch(clone)
    assert torch.equal(greedy(clone, prompt(30)).logits, dense.logits)


def test_a_saved_model_knows_nothing_of_the_patch(model, tmp_path):
    dense = greedy(model, prompt(30))
    patched(model, "h2o", 12).save_pretrained(tmp_path)
    assert "sparsekv" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(greedy(loaded, prompt(30)).logits, dense.logits)


def test_training_is_dense(model):
    """Loss and gradients of a patched model are those of the model."""
    gradients = []
    for patch in (False, True):
        if patch:
            patched(model, "h2o", 12)
        model.zero_grad()
        model(input_ids=prompt(30), labels=prompt(30), use_cache=False).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_a_forward_without_a_cache_of_ours_is_dense(model):
    """model(ids) makes a DynamicCache; only generate() and new_cache() give a sparse one."""
    with torch.no_grad():
        expected = model(prompt(30)).logits
        output = patched(model, "streaming", 8)(prompt(30))
    assert torch.equal(output.logits, expected)
    assert not isinstance(output_cache(output), sparsekv.SparseCache)


def test_report_of_a_run(model, batch):
    run = greedy(patched(model, "pyramid", 12), **renamed(batch), new=5)
    report = run.cache.report()
    assert report.tokens_seen == (34, 25)
    assert report.kept.mean == 12 + 4
    assert [layer.mean for layer in report.layers] == sorted(
        (layer.mean for layer in report.layers), reverse=True
    )
    assert report.dense_bytes == 2 * 3 * 2 * 34 * 2 * 16 * 4
    assert "policy pyramid: 34, 25 tokens seen" in str(report)
    assert report.to_dict()["layers"][0]["max"] == report.layers[0].max


def renamed(batch):
    return {"ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
