"""RULER's generators: lengths, seeds, where answers stand, and what must not be found."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from drawn_texts import train_tokenizer, write_data

from sparsekv.evaluation.example import Request
from sparsekv.evaluation.ruler import RULER, RulerTask, ruler_builder
from sparsekv.evaluation.ruler.fitting import fit, largest
from sparsekv.evaluation.ruler.haystack import hide
from sparsekv.evaluation.ruler.names import ADJECTIVES, NOUNS, Names
from sparsekv.evaluation.ruler.word_lists import zeta_counts

NIAH = [name for name in RULER if name.startswith("niah")]
LENGTH = 4096


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def tokenizer(data):
    return train_tokenizer(data)


@pytest.fixture(scope="module")
def request_(data, tokenizer):
    return Request(tokenizer, data, 4, 0)


@pytest.fixture(scope="module")
def tasks(request_):
    return {name: RulerTask(name, LENGTH)(request_) for name in RULER}


def texts(task, tokenizer):
    """(context, question, references) of every example, decoded."""
    for example in task.examples:
        (question,) = example.questions
        context = tokenizer.decode(example.context, skip_special_tokens=True)
        yield context, tokenizer.decode(question.prompt), question.references


@pytest.mark.parametrize("name", RULER)
def test_prompt_and_answer_fill_the_length_and_never_pass_it(tasks, name):
    task = tasks[name]
    assert task.name == f"ruler-{name}-4k" and task.kind == "generated"
    for example in task.examples:
        used = len(example.context) + len(example.questions[0].prompt) + task.max_new_tokens
        assert LENGTH - 256 < used <= LENGTH


@pytest.mark.parametrize("name", RULER)
def test_one_unit_more_would_not_fit(tasks, data, tokenizer, name):
    """The slack is less than one unit, whatever the unit is."""
    task, maker = tasks[name], RULER[name](name, data)
    recipe = maker.draw(Random(f"{task.name} 0 0"), 0, 4)
    room = LENGTH - task.max_new_tokens
    fitted = fit(recipe, tokenizer, room, 1)
    assert fitted.context == task.examples[0].context
    longer = tokenizer(recipe.context(fitted.size + 1))["input_ids"]
    assert len(longer) + len(fitted.question) > room


@pytest.mark.parametrize("name", RULER)
def test_the_seed_decides(tasks, request_, name):
    build = RulerTask(name, LENGTH)
    assert build(request_) == tasks[name]
    others = build(replace(request_, seed=1)).examples
    mine = tasks[name].examples
    assert all(a.context != b.context for a, b in zip(mine, others, strict=True))
    assert len({example.context for example in mine}) == len(mine)


@pytest.mark.parametrize("name", RULER)
def test_answers_stand_in_the_context_and_not_in_the_question(tasks, tokenizer, name):
    for context, question, references in texts(tasks[name], tokenizer):
        assert references and len(set(references)) == len(references)
        found = [reference in context for reference in references]
        assert any(found) if name.startswith("qa") else all(found)
        assert not any(f" {reference}" in question for reference in references)


@pytest.mark.parametrize("name", RULER)
def test_the_answer_fits_into_what_may_be_generated(tasks, tokenizer, name):
    for _, _, references in texts(tasks[name], tokenizer):
        needed = tokenizer(" " + ", ".join(references), add_special_tokens=False)["input_ids"]
        assert len(needed) <= tasks[name].max_new_tokens


@pytest.mark.parametrize("name", NIAH)
def test_needles_are_whole_and_keys_and_values_are_unique(tasks, tokenizer, name):
    counts = {"niah-multivalue": 4, "niah-multiquery": 4, "niah-multikey-1": 4}
    for context, question, references in texts(tasks[name], tokenizer):
        needles = re.findall(r"The special magic (?:number|UUID) for (.+?) is (\S+)\.", context)
        keys, values = zip(*needles, strict=True)
        assert len(needles) == context.count("The special magic")
        if name in counts or "single" in name:
            assert len(needles) == counts.get(name, 1)
        else:
            assert len(needles) > 20
        assert len(set(values)) == len(values)
        assert len(set(keys)) == (1 if name == "niah-multivalue" else len(keys))
        right = {value for key, value in needles if key in question}
        assert right == set(references), "what is asked about is what is scored"
        assert len(references) == (4 if name in ("niah-multivalue", "niah-multiquery") else 1)
        for value in values:
            assert context.count(value) == 1


def test_depths_of_the_needle_asked_about_are_stratified(request_, tokenizer):
    task = RulerTask("niah-single-1", 2048)(replace(request_, contexts=8))
    where = []
    for context, _, (value,) in texts(task, tokenizer):
        where.append(context.index(value) / len(context))
    strata = [int(8 * depth) for depth in where]
    assert all(abs(a - b) <= 1 for a, b in zip(strata, range(8), strict=True))


def test_a_value_that_the_prose_holds_is_not_drawn(data, tokenizer, tmp_path):
    """Else the answer would stand twice, once without its needle."""
    (tmp_path / "prose").mkdir()
    build = RulerTask("niah-single-2", 1024)
    plain = build(Request(tokenizer, data, 1, 0)).examples[0]
    (value,) = plain.questions[0].references
    for file in (data / "prose").iterdir():
        text = file.read_text(encoding="utf-8")
        text = re.sub(r"(\w+)\.", rf"\1 {value}.", text)
        (tmp_path / "prose" / file.name).write_text(text, encoding="utf-8")
    task = build(Request(tokenizer, tmp_path, 1, 0))
    ((context, _, (drawn,)),) = texts(task, tokenizer)
    assert value in context and drawn != value and context.count(drawn) == 1


def test_variables_form_one_chain_in_order(tasks, tokenizer):
    for context, question, references in texts(tasks["vt"], tokenizer):
        assert context.count("VAR ") == 2 * 9, "five assignments here and five in the example"
        value = re.search(r"value (\d+)", question)[1]
        lines = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", context)
        held = {}
        for name, source in lines:
            held[name] = source if source.isdigit() else held[source]  # defined before used
        assert [name for name, v in held.items() if v == value] == list(references)
        demo = set(held) - set(references)
        assert len(demo) == 5 and not demo & set(references)
        assert not set("".join(references)) & set("AEIOUY")


def test_common_words_are_common_and_in_no_other_word(tasks, tokenizer):
    for context, _, references in texts(tasks["cwe"], tokenizer):
        demo, listed = context.split("In the numbered list of words")[1:]
        words = re.findall(r"\d+\. (\w+)", listed)
        counts = Counter(words)
        assert {word for word, n in counts.items() if n == 30} == set(references)
        assert {n for word, n in counts.items() if word not in references} == {3}
        assert not any(r in w for r in references for w in counts if w != r)
        assert not any(r in demo for r in references)
        assert re.findall(r"(\d+)\.", listed) == [str(i) for i in range(1, len(words) + 1)]


def test_frequent_words_are_the_three_after_the_dots(tasks, tokenizer):
    for context, _, references in texts(tasks["fwe"], tokenizer):
        words = context.split("\n\n", 1)[1].split()
        ranked = Counter(words).most_common(6)
        assert ranked[0][0] == "...."
        assert [word for word, _ in ranked[1:4]] == list(references)
        assert ranked[3][1] > ranked[4][1], "the third place is nobody else's"


def test_zeta_counts_are_the_definition():
    # 1000 / zeta(2) = 607.93; / 4, / 9, / 16 after it.
    assert zeta_counts(1000)[:4] == [608, 152, 68, 38]


@pytest.mark.parametrize("name", ["qa-1", "qa-2"])
def test_only_one_document_holds_the_answer(tasks, tokenizer, name):
    for context, question, references in texts(tasks[name], tokenizer):
        documents = re.split(r"\n*Document \d+:\n", context)[1:]
        spaced = [spaced_words(text) for text in documents]
        answers = [spaced_words(answer) for answer in references]
        holding = [text for text in spaced if any(answer in text for answer in answers)]
        assert len(holding) == 1 and len(set(documents)) == len(documents) > 5
        assert min(map(len, references)) >= 3
        assert "Question: " in question and question.endswith("Answer:")


def spaced_words(text):
    words = re.findall(r"[^\W_]+", text.lower())
    return f" {' '.join(words)} "


def test_paragraphs_of_the_first_set_run_out_and_others_follow(request_, tokenizer):
    few = RulerTask("qa-1", 12_000)(replace(request_, contexts=1))
    assert len(few.examples[0].context) > 11_500
    with pytest.raises(ValueError, match="expected enough paragraphs in qa/ for"):
        RulerTask("qa-1", 60_000)(replace(request_, contexts=1))


def test_missing_texts_and_short_lengths_are_refused(request_, tmp_path):
    for name in ("niah-single-2", "cwe"):
        with pytest.raises(ValueError, match="expected a data folder with prose"):
            RulerTask(name, LENGTH)(replace(request_, data=tmp_path))
    for name in ("qa-1", "qa-2"):
        with pytest.raises(ValueError, match="expected a data folder with qa/"):
            RulerTask(name, LENGTH)(replace(request_, data=None))
        with pytest.raises(ValueError, match="expected a readable file"):
            RulerTask(name, LENGTH)(replace(request_, data=tmp_path))
    with pytest.raises(ValueError, match="expected room for at least"):
        RulerTask("cwe", 512)(request_)


def test_two_tasks_need_no_data(request_):
    for name in ("niah-single-1", "vt", "fwe", "niah-multikey-2", "niah-multikey-3"):
        assert RulerTask(name, 2048)(replace(request_, data=None, contexts=1)).examples


def test_names_parse():
    assert ruler_builder("ruler-niah-multikey-2-16k") == RulerTask("niah-multikey-2", 16_384)
    assert ruler_builder("ruler-qa-1-10000") == RulerTask("qa-1", 10_000)
    assert ruler_builder("ruler-vt-128k").name == "ruler-vt-128k"
    assert RulerTask("vt", 10_000).name == "ruler-vt-10000"
    for name in ("ruler-vt", "ruler-niah-4k", "niah-single-1-4k", "ruler-qa-3-4k"):
        with pytest.raises(ValueError, match="expected ruler-TASK-LENGTH"):
            ruler_builder(name)
    assert len(RULER) == 13


def test_needles_stand_between_sentences():
    made = hide(["One. ", "Two. "], [(0.0, "A."), (0.5, "B."), (0.5, "C."), (1.0, "D.")])
    assert made == "A. One. B. C. Two. D. "
    assert hide([], [(0.7, "A.")]) == "A. "


def test_names_are_distinct_and_no_name_is_part_of_another():
    names = Names(Random(0), "words")
    made = [names[i] for i in range(8000)]
    assert len(set(made)) == 8000 < names.most
    assert not any(a != b and b.startswith(a) for a in NOUNS for b in NOUNS)
    assert not any(a != b and b.endswith(a) for a in ADJECTIVES for b in ADJECTIVES)


@pytest.mark.parametrize("tokens", [lambda n: 7 + 3 * n, lambda n: 5 + n * n, lambda n: n // 4])
def test_largest_is_the_largest(tokens):
    for room in (8, 50, 1000):
        for guess in (1, 10, 5000):
            size = largest(tokens, room, None, guess)
            assert tokens(size) <= room < tokens(size + 1)
            assert largest(tokens, room, 2, guess) == min(size, 2)
