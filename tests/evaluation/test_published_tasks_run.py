"""RULER's, LongBench's and MMLU's tasks through the runner, with a tiny model."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import sparsekv
from sparsekv.evaluation.example import Request
from sparsekv.evaluation.lookup import find_builder
from sparsekv.evaluation.runner import evaluate

PROTOCOLS = ("question-aware", "question-agnostic")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"), initializer_range=0.25)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer


@pytest.fixture
def request_(parts, tmp_path):
    return Request(parts[1], tmp_path, 2, 0)


def generated(parts, example, new):
    """What the plain model generates after context and question."""
    model, tokenizer = parts
    ids = torch.tensor([example.context + example.questions[0].prompt])
    out = sparsekv.unpatch(model).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", ["ruler-niah-single-1-1k", "ruler-vt-1500"])
def test_ruler_under_full_is_what_the_plain_model_generates(parts, request_, name, protocol):
    task = find_builder(name)(request_)
    records = evaluate(*parts, task, "full", 1.0, protocol)
    by_example = {record.example: record for record in records}
    for example in task.examples:
        record = by_example.pop(example.id)
        assert record.text == generated(parts, example, task.max_new_tokens)
        assert record.headline == "string_match_all"
        assert record.value == task.score(record.text, example.questions[0].references)
    assert not by_example


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_evicted_changes_what_is_generated(parts, request_, protocol):
    task = find_builder("ruler-niah-single-1-1k")(request_)
    records = evaluate(*parts, task, "streaming", 64, protocol)
    dense = {generated(parts, example, task.max_new_tokens) for example in task.examples}
    assert not {record.text for record in records} & dense
    assert all(record.kept == 64 for record in records)


def test_mmlu_is_a_choice_and_longbench_is_generated(parts, request_):
    pytest.importorskip("datasets", reason="needs datasets: pip install sparsekv[eval]")
    for split, count in (("dev", 5), ("test", 3)):
        row = {"question": "Is it?", "subject": "law", "choices": list("wxyz"), "answer": 2}
        (request_.data / "mmlu").mkdir(exist_ok=True)
        file = request_.data / "mmlu" / f"{split}.jsonl"
        file.write_text("\n".join([json.dumps(row)] * count), encoding="utf-8")
    (request_.data / "longbench").mkdir()
    row = {"input": "Where?", "context": "It is in Rome. " * 20, "answers": ["Rome"]}
    file = request_.data / "longbench" / "qmsum.jsonl"
    file.write_text(json.dumps(row | {"all_classes": None}), encoding="utf-8")
    mmlu = evaluate(*parts, find_builder("mmlu")(request_), "snapkv", 64, "question-agnostic")
    assert [record.question for record in sorted(mmlu, key=lambda r: r.question)] == ["0", "1", "2"]
    assert all(record.value in (0.0, 1.0) for record in mmlu)
    task = find_builder("longbench-qmsum-1k")(request_)
    (record,) = evaluate(*parts, task, "snapkv", 64, "question-agnostic")
    assert record.headline == "rouge_l" and 0 <= record.value <= 1 and record.text is not None
