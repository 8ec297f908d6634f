"""The tasks: exact prompts, exact lengths, evidence where it is said to be, nothing by chance."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from eval_rig import made_up
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekv.evaluation.example import Example, Question, Request, Task
from sparsekv.evaluation.tasks import FULL, SMOKE, TASKS
from sparsekv.evaluation.tasks.icl import icl
from sparsekv.evaluation.tasks.lm import lm
from sparsekv.evaluation.tasks.needle import needle
from sparsekv.evaluation.tasks.passkey import passkey
from sparsekv.evaluation.tasks.recall import recall
from sparsekv.evaluation.tasks.xquad import xquad
from sparsekv.evaluation.texts import insert, sentence_ends, strata

NAMES = (
    "needle-1k", "needle-2k", "needle-4k", "passkey-1k", "passkey-4k", "recall-1k", "recall-4k",
    "recall-code-2k", "xquad-1k", "icl-1k", "lm-prose-2k", "lm-prose-4k", "lm-code-2k",
    "lm-code-4k", "arc-easy",
)  # fmt: skip


@pytest.fixture
def ask(subject, data):
    """(contexts, seed) -> request."""
    return lambda contexts=3, seed=0: Request(subject[1], data, contexts, seed)


@pytest.fixture
def text(subject):
    """Token ids -> text."""
    return subject[1].decode


def test_names():
    assert tuple(TASKS) == NAMES
    assert set(SMOKE) < set(FULL) == set(NAMES)


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("1k") or n == "arc-easy"])
def test_a_request_makes_one_task(name, ask):
    """The same request the same task; another seed another."""
    one, again, other = (TASKS[name](ask(2, seed)) for seed in (3, 3, 4))
    assert one == again and one != other and one.name == name
    assert len(one.examples) == 2 and len({e.id for e in one.examples}) == 2
    for e in one.examples:
        assert e.questions and len({q.id for q in e.questions}) == len(e.questions)
        assert all(q.prompt and all(q.answers) for q in e.questions)
        assert all(q.right < len(q.answers) for q in e.questions)


def test_needles(ask, text):
    task = needle(ask(), tokens=2048, keys=4)
    assert (task.name, task.kind, task.headline) == ("needle-2k", "forced", "em")
    for e in task.examples:
        assert len(e.context) == 2048 and len(e.questions) == 4
        whole = text(e.context)
        assert whole.startswith(
            "Some special magic words are hidden within the following text. "
            "Make sure to memorize them.\n\n"
        )
        lines = re.findall(
            r"\nThe special magic word for (\w+ \w+) is (\w+)\. "
            r"Remember it: the special magic word for \1 is \2\.\n",
            whole,
        )
        assert len(lines) == 4 and len(set(lines)) == 4
        depths = [whole.index(f"for {key} is") / len(whole) for key, _ in lines]
        assert [int(depth * 4) for depth in depths] == pytest.approx([0, 1, 2, 3], abs=1)
        for q in e.questions:
            word = dict(lines)[q.id]
            assert text(q.answers[0]) == f" {word}"
            demos = text(q.prompt).split("\n\nQuestion: ")[1:]
            assert len(demos) == 3
            for demo in demos[:2]:  # worked questions about others, answered as the text does
                key, answer = re.fullmatch(
                    r"What is the special magic word for (\w+ \w+)\?\n"
                    r"Answer: The special magic word for \1 is (\w+)\.",
                    demo,
                ).groups()
                assert dict(lines)[key] == answer and key != q.id
            assert demos[2] == (
                f"What is the special magic word for {q.id}?\n"
                f"Answer: The special magic word for {q.id} is"
            )


def test_pass_keys_stand_at_all_depths(ask, text):
    """A tenth of the contexts has its key in each tenth of the text."""
    task = passkey(ask(10), tokens=1024)
    depths = []
    for e in task.examples:
        whole, key = text(e.context), text(e.questions[0].answers[0]).strip()
        assert len(e.context) == 1024 and re.fullmatch(r"\d{5}", key)
        sentence = f" The pass key is {key}. Remember it. {key} is the pass key."
        assert whole.count(sentence) == 1
        depths.append(whole.index(sentence) / (len(whole) - len(sentence)))
        question = text(e.questions[0].prompt)
        assert question == "\n\nQuestion: What is the pass key?\nAnswer: The pass key is"
    assert sorted(depths) == pytest.approx([(i + 0.5) / 10 for i in range(10)], abs=0.1)
    assert depths != sorted(depths)


@pytest.mark.parametrize("code", [False, True])
def test_recall_quotes_the_context(ask, text, code):
    task = recall(ask(), tokens=1024, code=code)
    for e in task.examples:
        assert len(e.context) == 1024 and len(e.questions) == 8
        places = []
        for q in e.questions:
            head, cue = text(q.prompt[:-24]), q.prompt[-24:]
            assert head == "\n\n* * *\n\nLet us read that passage again: ..."
            quote = cue + q.answers[0]
            assert len(quote) == 72
            places.append(next(i for i in range(953) if e.context[i : i + 72] == quote))
        assert places == sorted(places) and places[0] < 119 and places[-1] > 830


@pytest.mark.parametrize("code", [False, True])
def test_lm_goes_on_with_the_text(ask, text, data, code):
    task = lm(ask(), tokens=1024, code=code)
    files = [f.read_text() for f in (data / ("code" if code else "prose")).glob("*.txt")]
    for e in task.examples:
        (q,) = e.questions
        assert (len(e.context), len(q.prompt), len(q.answers[0])) == (1024, 1, 256)
        assert any(text(e.context + q.prompt + q.answers[0]) in file for file in files)


def test_xquad_is_open_book(ask, text):
    task = xquad(ask(), tokens=1024)
    for e in task.examples:
        whole = text(e.context)
        assert len(e.context) <= 1024
        assert whole.startswith("Read the following passages, then answer the questions with a")
        assert whole.endswith("\n\n") and 1 <= len(e.questions) <= 7
        for q in e.questions:
            parts = text(q.prompt).split("\n\n")
            assert len(parts) == 5 and all(p.startswith("Question: ") for p in parts)
            assert all("\nAnswer: " in p for p in parts[:4]) and parts[4].endswith("\nAnswer:")
            shown = [re.search("Answer: (.*)", p).group(1) for p in parts[:4]]
            assert all(answer in whole for answer in [*shown, text(q.answers[0]).strip()])


def test_xquad_wants_questions_behind_the_worked_ones(ask):
    """A tokenizer of bytes may fit no paragraph at all."""
    with pytest.raises(ValueError, match="expected paragraphs with more than 4 questions"):
        xquad(ask(), tokens=150)


def test_icl_asks_new_words_by_the_labels_shown(ask, text):
    task = icl(ask(), tokens=1024)
    for e in task.examples:
        whole = text(e.context)
        assert 1000 < len(e.context) <= 1024
        pairs = re.findall(r"Input: (\S+)\nLabel: (\w+)", whole)
        assert "\n\n".join(f"Input: {a}\nLabel: {b}" for a, b in pairs) == whole
        labels: dict[str, set] = {}
        for word, label in pairs:
            labels.setdefault(label, set()).add(word)
        assert sorted(labels) == ["Alpha", "Beta", "Delta", "Gamma"]
        assert len(set.union(*labels.values())) == sum(map(len, labels.values()))
        answers = [text(q.answers[0]) for q in e.questions]
        assert sorted(answers) == sorted(2 * [f" {label}" for label in labels])
        for q in e.questions:
            assert text(q.prompt) == f"\n\nInput: {q.id}\nLabel:" and q.id not in dict(pairs)


def test_arc_is_a_control_and_asks_nothing_twice(ask, text):
    task = TASKS["arc-easy"](ask(4))
    assert task.control and task.kind == "choice" and task.headline == "mc"
    asked = [q.id for e in task.examples for q in e.questions]
    assert len(asked) == len(set(asked)) == 100
    for e in task.examples:
        shots = text(e.context).split("\n\n")
        assert len(shots) == 40 and all("\nAnswer: " in shot for shot in shots)
        for q in e.questions:
            assert text(q.prompt) not in text(e.context) and len(q.answers) == 4
    with pytest.raises(ValueError, match="expected at most 6 contexts of arc-easy, got 7"):
        TASKS["arc-easy"](ask(7))


@pytest.mark.parametrize("name", ["needle-1k", "xquad-1k", "lm-code-2k", "arc-easy"])
def test_data_that_is_missing(name, subject, tmp_path):
    for folder, reason in ((None, "expected --data"), (tmp_path, "got none in")):
        with pytest.raises(ValueError, match=reason):
            TASKS[name](Request(subject[1], folder, 2, 0))


def test_texts_that_are_too_short(subject, tmp_path):
    (tmp_path / "prose").mkdir()
    (tmp_path / "prose/a.txt").write_text("Short.")
    with pytest.raises(ValueError, match="expected a text of more than 6144 characters"):
        TASKS["passkey-1k"](Request(subject[1], tmp_path, 2, 0))


@settings(max_examples=50)
@given(
    depths=st.lists(st.floats(0, 1), max_size=6),
    sentences=st.lists(st.integers(1, 9), max_size=12),
)
def test_inserted_pieces_keep_the_text(depths, sentences):
    """Taking the pieces out leaves the text; they stand at ends of sentences, near their depths."""

    class Letters:
        def convert_ids_to_tokens(self, ids):
            return ["." if i == 0 else "x" for i in ids]

    ids = [token for n in sentences for token in [*range(1, n), 0]]
    pieces = [[-1 - i] * 3 for i in range(len(depths))]
    out = insert(Letters(), ids, pieces, depths)
    assert [token for token in out if token >= 0] == ids
    ends = sentence_ends(Letters(), ids)
    for i, depth in enumerate(depths):
        at = out.index(-1 - i)
        place = sum(token >= 0 for token in out[:at])
        assert out[at : at + 3] == pieces[i] and place in ends
        nearest = min(abs(end - depth * len(ids)) for end in ends)
        assert abs(place - depth * len(ids)) == pytest.approx(nearest)


@given(count=st.integers(1, 40), seed=st.integers(0, 99))
def test_strata(count, seed):
    import random

    depths = strata(count, random.Random(seed))
    assert [int(depth * count) for depth in depths] == list(range(count))


def test_made_up_tasks_have_no_ties():
    """Of the rig itself: no token twice in a context."""
    for e in made_up().examples:
        assert len(set(e.context)) == len(e.context)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (lambda q: ("forced", [q, q], {}), "expected every id once in own 0"),
        (lambda q: ("choice", [replace(q, right=1)], {}), "expected answers as kind 'choice'"),
        (lambda q: ("generated", [q], {}), "expected a score and max_new_tokens >= 1 in own"),
        (lambda q: ("forced", [replace(q, answers=())], {}), "expected answers as kind 'forced'"),
        (lambda q: ("forced", [replace(q, prompt=())], {}), "expected at least one token in the"),
        (lambda q: ("forced", [replace(q, answers=((),))], {}), "expected at least one token in"),
    ],
)
def test_own_tasks_that_would_give_a_number_of_no_meaning(task, message):
    with pytest.raises(ValueError, match=message):
        kind, questions, more = task(Question("q", (1,), ((2,),)))
        Task("own", kind, "em", (Example("0", (3, 4), tuple(questions)),), **more)


def test_no_question_of_xquad_is_asked_twice_in_a_context(data, subject):
    """Few paragraphs: a context at the end of a round may hold one of them twice."""
    for seed in range(6):
        task = xquad(Request(subject[1], data, 100, seed), 1024)
        for example in task.examples:
            assert len({q.id for q in example.questions}) == len(example.questions)
