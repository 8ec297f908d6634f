"""`Document`: answers of a slow loop, a cache that no question changes, files, the chat's cut."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import sparsekv
from sparsekv.hf.compat import cache_key
from sparsekv.hf.patch import is_patched
from sparsekv.policies import POLICIES, SnapKV

TEXT = "Each word of this text is short, and there are many of them. " * 3
QUESTIONS = ["How many?", "Is it?", "What does the text say of its own words, all in all?"]
# duo wants gates, planned a plan; pyramidinfer allows no second turn.
POLICIES_HERE = sorted(set(POLICIES) - {"duo", "planned", "pyramidinfer"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return save_tiny_model(folder, num_hidden_layers=3, initializer_range=0.25)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@functools.cache
def _model(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture
def model(folder):
    return sparsekv.unpatch(_model(folder))


def bytes_of(cache):
    """Everything a cache holds: tables, lengths, and what lies in the slots in use."""
    state, found = cache.state, [cache.state.seen, cache.state.tokens.tolist()]
    for store in state.stores:
        found += [store.table.tobytes(), store.lens.tobytes(), store.pool.refcount.tobytes()]
        found += [store.block_table.numpy().tobytes(), store.seqlens.numpy().tobytes()]
        tensors = store.pool.page_tensors.values()
        found += [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return found


@torch.no_grad()
def by_hand(document, question, new):
    """A manual loop over a copy of the document's cache."""
    model, cache = document.model, document.cache()
    text, asked = document.prompt(question)
    at, made = text.shape[1], []
    for _ in range(new):
        positions = torch.arange(at, at + asked.shape[1])[None]
        inputs = {"input_ids": asked, "position_ids": positions, cache_key(model): cache}
        token = int(model(**inputs, use_cache=True).logits[0, -1].argmax())
        if token == document.tokenizer.eos_token_id:
            break
        at, asked = at + asked.shape[1], torch.tensor([[token]])
        made.append(token)
    return document.tokenizer.decode(made, skip_special_tokens=True).strip()


@pytest.mark.parametrize("policy", POLICIES_HERE)
def test_answers_are_those_of_a_manual_loop_and_change_nothing(model, tokenizer, policy):
    document = sparsekv.Document(model, tokenizer, TEXT, policy, 60)
    before = bytes_of(document._cache)
    expected = [by_hand(document, question, 6) for question in QUESTIONS]
    answers = [document.ask(question, max_new_tokens=6) for question in QUESTIONS]
    assert answers == expected
    assert document.ask(QUESTIONS[0], max_new_tokens=6) == expected[0]
    assert document.ask_all(QUESTIONS, max_new_tokens=6) == expected, "as one batch"
    assert bytes_of(document._cache) == before
    assert document.report().tokens_seen == (document.tokens,)


def test_full_answers_as_one_dense_prompt(model, tokenizer):
    document = sparsekv.Document(model, tokenizer, TEXT, "full", 1.0)
    answers = [document.ask(question, max_new_tokens=8) for question in QUESTIONS]
    prompts = [torch.cat(document.prompt(question), dim=1) for question in QUESTIONS]
    sparsekv.unpatch(model)
    for ids, answer in zip(prompts, answers, strict=True):
        out = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(out, skip_special_tokens=True).strip() == answer


def test_the_budget_holds_for_the_text(model, tokenizer):
    document = sparsekv.Document(model, tokenizer, TEXT, budget=0.25)
    report = document.report()
    assert report.policy == "kvzip"
    assert report.kept.mean == pytest.approx(0.25 * document.tokens, abs=1)
    assert report.ratio < 0.5


def test_text_and_question_are_one_turn_of_the_chat(model, tokenizer):
    document = sparsekv.Document(model, tokenizer, TEXT, "snapkv", 60)
    text, asked = document.prompt("How many?")
    turn = [{"role": "user", "content": f"{TEXT}\n\nHow many?"}]
    whole = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(torch.cat([text, asked], dim=1)[0]) == whole
    assert tokenizer.decode(text[0]) == f"<u>{TEXT}"
    assert tokenizer.decode(asked[0]) == "\n\nHow many?<a>"


@pytest.mark.parametrize("has_template", [False, True])
def test_without_a_chat_a_question_follows_the_text(model, tokenizer, has_template):
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = tokenizer.chat_template if has_template else None
    document = sparsekv.Document(model, plain, TEXT, "snapkv", 60, chat=not has_template)
    text, asked = document.prompt("How many?")
    assert plain.decode(text[0]) == TEXT
    assert plain.decode(asked[0]) == "\n\nQuestion: How many?\nAnswer:"


@pytest.mark.parametrize("policy", ["kvzip", "criticalkv", "quest", "rkv", "streaming"])
def test_a_saved_document_answers_the_same(model, folder, tokenizer, tmp_path, policy):
    document = sparsekv.Document(model, tokenizer, TEXT, policy, 60)
    answers = document.ask_all(QUESTIONS, max_new_tokens=6)
    held = bytes_of(document._cache)
    document.save(tmp_path / "text.doc")
    sparsekv.unpatch(model)
    other = AutoModelForCausalLM.from_pretrained(folder).eval()
    loaded = sparsekv.Document.load(other, tokenizer, tmp_path / "text.doc")
    assert bytes_of(loaded._cache) == held
    assert loaded.report() == document.report()
    assert loaded.ask_all(QUESTIONS, max_new_tokens=6) == answers
    assert loaded.cache().state.policy == document._cache.state.policy


def test_a_saved_document_holds_the_cache_and_no_model(model, tokenizer, tmp_path):
    document = sparsekv.Document(model, tokenizer, TEXT, "criticalkv", 60)
    document.save(tmp_path / "text.doc")
    report = document.report()
    held = report.kv_bytes + report.metadata_bytes
    assert (tmp_path / "text.doc").stat().st_size < held + 40_000


def test_another_model_or_file_is_refused(model, tokenizer, tmp_path):
    file = tmp_path / "text.doc"
    sparsekv.Document(model, tokenizer, TEXT, "snapkv", 60).save(file)
    other = copy.deepcopy(sparsekv.unpatch(model))
    with torch.no_grad():
        other.get_input_embeddings().weight[3, 3] += 1
    with pytest.raises(ValueError, match="expected the model that read"):
        sparsekv.Document.load(other, tokenizer, file)
    torch.save({"version": 0}, file)
    with pytest.raises(ValueError, match="expected a document of version 1"):
        sparsekv.Document.load(model, tokenizer, file)


def test_a_later_patch_does_no_harm(model, tokenizer):
    first = sparsekv.Document(model, tokenizer, TEXT, "snapkv", 60)
    answer = first.ask(QUESTIONS[2], max_new_tokens=6)
    second = sparsekv.Document(model, tokenizer, TEXT[5:], "streaming", 30)
    second.ask(QUESTIONS[2], max_new_tokens=6)
    assert first.ask(QUESTIONS[2], max_new_tokens=6) == answer
    sparsekv.unpatch(model)
    with pytest.raises(ValueError, match="expected the model to be patched still"):
        first.ask(QUESTIONS[2])


def test_a_text_may_be_read_in_pieces(model, tokenizer):
    """Of `full` nothing is evicted, so the pieces make no difference; questions are turns."""
    whole = sparsekv.Document(model, tokenizer, TEXT, "full", 1.0)
    pieces = sparsekv.Document(model, tokenizer, TEXT, "full", 1.0, prefill_chunk_size=50)
    assert pieces.ask_all(QUESTIONS, max_new_tokens=6) == whole.ask_all(QUESTIONS, max_new_tokens=6)
    window = sparsekv.Document(model, tokenizer, TEXT, SnapKV(window=8), 60, prefill_chunk_size=50)
    assert window.ask(QUESTIONS[0], max_new_tokens=6) == by_hand(window, QUESTIONS[0], 6)
    assert window.report().kept.max <= 60


def test_quantised_documents_answer(model, tokenizer):
    document = sparsekv.Document(model, tokenizer, TEXT, "snapkv", 60, kv_dtype="int8")
    assert document.ask(QUESTIONS[0], max_new_tokens=6) == by_hand(document, QUESTIONS[0], 6)
    assert document.report().kv_dtype == "int8"


def test_options_reach_generate(model, tokenizer):
    document = sparsekv.Document(model, tokenizer, TEXT, "snapkv", 60)
    torch.manual_seed(0)
    sampled = document.ask(QUESTIONS[0], max_new_tokens=12, do_sample=True, temperature=5.0)
    assert sampled != document.ask(QUESTIONS[0], max_new_tokens=12)


@pytest.mark.parametrize("defaults", [False, True])
def test_beams_search_as_after_one_dense_prompt(model, tokenizer, monkeypatch, defaults):
    """Given as an option or by the model's generation config, which reading does not follow."""
    if defaults:
        monkeypatch.setattr(model.generation_config, "num_beams", 3)
        monkeypatch.setattr(model.generation_config, "return_dict_in_generate", True)
    document = sparsekv.Document(model, tokenizer, TEXT, "full", 1.0)
    beams = {} if defaults else {"num_beams": 3}
    answers = [document.ask(one, max_new_tokens=8, **beams) for one in QUESTIONS]
    assert document.ask_all(QUESTIONS, max_new_tokens=8, **beams) == answers
    assert document.ask_all(QUESTIONS, max_new_tokens=8, num_beams=1) != answers
    prompts = [torch.cat(document.prompt(question), dim=1) for question in QUESTIONS]
    sparsekv.unpatch(model)
    search = {"num_beams": 3, "do_sample": False, "return_dict_in_generate": False}
    for ids, answer in zip(prompts, answers, strict=True):
        out = model.generate(ids, max_new_tokens=8, **search)[0, ids.shape[1] :]
        assert tokenizer.decode(out, skip_special_tokens=True).strip() == answer


@pytest.mark.parametrize("policy", ["kvzip", "rkv", "snapkv"])
def test_beams_of_a_compressed_text_change_nothing(model, tokenizer, policy):
    document = sparsekv.Document(model, tokenizer, TEXT, policy, 60)
    before = bytes_of(document._cache)
    answers = [document.ask(one, max_new_tokens=6, num_beams=2) for one in QUESTIONS]
    assert document.ask_all(QUESTIONS, max_new_tokens=6, num_beams=2) == answers
    assert bytes_of(document._cache) == before


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("input_ids", None), ("inputs", None), ("inputs_embeds", None), ("attention_mask", None),
        ("position_ids", None), ("cache", None), ("past_key_values", None), ("use_cache", False),
        ("cache_implementation", "static"), ("return_dict_in_generate", True),
        ("num_return_sequences", 2), ("generation_config", None), ("token_healing", True),
        ("prompt_lookup_num_tokens", 2), ("assistant_model", None), ("num_beams", 0),
    ],
)  # fmt: skip
def test_options_that_are_not_taken_are_named(model, tokenizer, option, value):
    document = sparsekv.Document(model, tokenizer, TEXT, "snapkv", 60)
    for ask, asked in ((document.ask, QUESTIONS[0]), (document.ask_all, QUESTIONS)):
        with pytest.raises(ValueError, match=rf"expected .*{option}\b"):
            ask(asked, max_new_tokens=4, **{option: value})


NOT_DOCUMENTS = {
    "empty": b"",
    "text": b"localhost\n",
    "json": b'{"version": 1}',
    "bytes": bytes(range(256)),
    "a pickle of a class that is gone": b"\x80\x04cnowhere\nNothing\n.",
    "a zip of nothing": b"PK\x05\x06" + bytes(18),
}


@pytest.mark.parametrize("content", NOT_DOCUMENTS.values(), ids=NOT_DOCUMENTS)
def test_a_file_that_is_no_document_is_refused(model, tokenizer, tmp_path, content):
    file = tmp_path / "other"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"expected a document of version 1 in .*got another file"):
        sparsekv.Document.load(model, tokenizer, file)


def test_other_saved_things_are_refused(model, tokenizer, tmp_path):
    file = tmp_path / "text.doc"
    refused = pytest.raises(ValueError, match="expected a document of version 1")
    for other in ({"version": 1}, {"version": torch.ones(2)}, [1], model.state_dict()):
        torch.save(other, file)
        with refused:
            sparsekv.Document.load(model, tokenizer, file)
    sparsekv.Document(model, tokenizer, TEXT, "snapkv", 60).save(file)
    file.write_bytes(file.read_bytes()[:-100])
    with refused:
        sparsekv.Document.load(model, tokenizer, file)
    with pytest.raises(FileNotFoundError):
        sparsekv.Document.load(model, tokenizer, tmp_path / "absent")


def test_what_cannot_be_asked_is_refused(model, tokenizer):
    make = functools.partial(sparsekv.Document, model, tokenizer)
    with pytest.raises(ValueError, match="expected a text of at least one token"):
        make("", "snapkv", 60)
    with pytest.raises(ValueError, match="allows a second turn, got 'pyramidinfer'"):
        make(TEXT, "pyramidinfer", 60)
    with pytest.raises(ValueError, match="expected '<<the question>>' once"):
        make("A text with <<the question>> in it", "snapkv", 60)
    document = make(TEXT, "snapkv", 60)
    with pytest.raises(ValueError, match="expected a question, got an empty one"):
        document.ask("  ")
    with pytest.raises(ValueError, match="expected at least one question"):
        document.ask_all([])
    with pytest.raises(ValueError, match="expected a list of questions, got a str"):
        document.ask_all(QUESTIONS[0])
    with pytest.raises(ValueError, match="expected a question as a str, got list"):
        document.ask(QUESTIONS)
    shouting = copy.deepcopy(tokenizer)
    shouting.chat_template = "{% for m in messages %}<u>{{ m['content'] | upper }}{% endfor %}<a>"
    with pytest.raises(ValueError, match="changes what users say"):
        sparsekv.Document(model, shouting, TEXT, "snapkv", 60)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ([TEXT, TEXT], {}, "expected a text as a str, got list"),  # not what Python prints of it
        (TEXT.encode(), {}, "expected a text as a str, got bytes"),
        (None, {}, "expected a text as a str, got NoneType"),
        (TEXT, {"prefill_chunk_size": 0}, "expected prefill_chunk_size to be an integer >= 1"),
        (TEXT, {"prefill_chunk_size": 2.5}, "expected prefill_chunk_size to be an integer >= 1"),
    ],
)
def test_what_cannot_be_read_is_refused(model, tokenizer, text, options, message):
    with pytest.raises(ValueError, match=message):
        sparsekv.Document(model, tokenizer, text, **options)
    assert not is_patched(model)


@pytest.mark.parametrize("name", [".", "absent/report.kv"])
def test_a_file_that_cannot_be_written_is_an_os_error(model, tokenizer, tmp_path, name):
    """As one that cannot be read is: torch's own is a RuntimeError."""
    with pytest.raises(OSError):
        sparsekv.Document(model, tokenizer, TEXT, SnapKV(), 30).save(tmp_path / name)
