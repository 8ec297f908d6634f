"""LongBench, RULER's published questions and MMLU from files that the tests write.

The rows go through the real `datasets`; only the hub is played by a local archive.
"""

from __future__ import annotations

import builtins
import csv
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from drawn_texts import train_tokenizer, write_data

from sparsekv.evaluation.example import Request
from sparsekv.evaluation.sets import set_builder
from sparsekv.evaluation.sets.loading import without_middle
from sparsekv.evaluation.sets.longbench_subsets import SUBSETS

ANSWERS = {
    "trec": ("Date", "Date"),
    "lsht": ("体育", "体育"),
    "passage_count": ("7", "7"),
    "passage_retrieval_en": ("Paragraph 7", "Paragraph 7"),
    "passage_retrieval_zh": ("段落7", "段落7"),
}
# LongBench's limits of new tokens, by subset.
LIMITS = {
    32: "hotpotqa 2wikimqa musique triviaqa passage_count passage_retrieval_en "
    "passage_retrieval_zh",
    64: "multifieldqa_en multifieldqa_zh trec lsht lcc repobench-p",
    128: "narrativeqa qasper dureader samsum",
    512: "gov_report qmsum multi_news vcsum",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(write_data(tmp_path_factory.mktemp("data")), 1000)


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The package, whose usual cache must stay empty."""
    package = pytest.importorskip("datasets", reason="needs datasets: pip install sparsekv[eval]")
    package.disable_progress_bars()
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    yield package
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def request_(tokenizer, tmp_path):
    return Request(tokenizer, tmp_path, 2, 0)


def write_rows(datasets, file: Path, rows: list[dict]) -> None:
    """By the ending of `file`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".jsonl":
        file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    elif file.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(file))
    else:
        with file.open("w", encoding="utf-8", newline="") as out:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            plain = (str, int)
            writer.writerows(
                {k: v if isinstance(v, plain) else json.dumps(v) for k, v in row.items()}
                for row in rows
            )


def longbench_row(number: int, subset: str) -> dict:
    answer = ANSWERS.get(subset, ("Rome {1}", ""))[0]
    return {
        "input": f"Where is {{x}} {number}?",
        "context": f"Text {{0}} number {number}. " + "word " * 50,
        "answers": [answer, f"{answer} "] if subset not in ANSWERS else [answer],
        "all_classes": ["Date", "Place", "体育"] if subset in ("trec", "lsht") else None,
        "_id": str(number),
    }


def decoded(tokenizer, task):
    for example in task.examples:
        yield tokenizer.decode(example.context), tokenizer.decode(example.questions[0].prompt)


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "csv"])
def test_longbench_reads_every_format(datasets, request_, tokenizer, ending):
    rows = [longbench_row(i, "hotpotqa") for i in range(5)]
    write_rows(datasets, request_.data / "longbench" / f"hotpotqa.{ending}", rows)
    task = set_builder("longbench-hotpotqa")(request_)
    assert (task.kind, task.headline, task.max_new_tokens) == ("generated", "qa_f1", 32)
    assert len(task.examples) == 2
    for (context, asked), example in zip(decoded(tokenizer, task), task.examples, strict=True):
        number = int(example.id.rsplit("/", 1)[1])
        assert context.startswith("<s>Read the passages") and rows[number]["context"] in context
        assert f"Question: Where is {{x}} {number}?\nAnswer:" in asked
        assert example.questions[0].references == ("Rome {1}", "Rome {1} ")
    assert set_builder("longbench-hotpotqa")(request_) == task
    assert set_builder("longbench-hotpotqa")(replace(request_, contexts=9)).examples[4:]


@pytest.mark.parametrize("subset", SUBSETS)
def test_every_longbench_subset_scores_its_own_answers(datasets, request_, subset):
    file = request_.data / "longbench" / f"{subset}.jsonl"
    write_rows(datasets, file, [longbench_row(i, subset) for i in range(2)])
    task = set_builder(f"longbench-{subset}")(request_)
    assert task.max_new_tokens == next(n for n, names in LIMITS.items() if subset in names.split())
    for example in task.examples:
        (question,) = example.questions
        assert question.prompt
        answer = question.references[0]
        assert task.score(answer, question.references) == 1.0
        assert task.score("nothing of the kind ...", question.references) < 0.5
        second = "\nDate Place 8"
        assert (task.score(answer + second, question.references) == 1.0) == (
            SUBSETS[subset].first_line or task.headline == "code_similarity"
        )


def test_there_are_21_subsets():
    assert len(SUBSETS) == 21 == sum(len(names.split()) for names in LIMITS.values())


def test_long_contexts_lose_their_middle(datasets, request_, tokenizer):
    row = longbench_row(0, "lcc") | {"context": "start " + "middle " * 900 + "end"}
    write_rows(datasets, request_.data / "longbench" / "lcc.jsonl", [row])
    (example,) = set_builder("longbench-lcc-512")(request_).examples
    assert len(example.context) + len(example.questions[0].prompt) + 64 == 512
    text = tokenizer.decode(example.context)
    assert text.startswith("<s>Continue") and "start" in text and text.endswith("end")
    (whole,) = set_builder("longbench-lcc")(request_).examples
    assert len(whole.context) > 900, "this tokenizer names no limit"
    assert without_middle(range(9), 5, "") == (0, 1, 2, 7, 8)
    with pytest.raises(ValueError, match="expected room for a context"):
        set_builder("longbench-lcc-70")(request_)


def test_longbench_from_the_archive_of_the_hub(datasets, request_, tmp_path, monkeypatch):
    archive = tmp_path / "data.zip"
    rows = "\n".join(json.dumps(longbench_row(i, "vcsum")) for i in range(3))
    with zipfile.ZipFile(archive, "w") as out:
        out.writestr("data/vcsum.jsonl", rows)
        out.writestr("data/lcc.jsonl", json.dumps({"a": 1}))
    asked = []

    def download(*args, **kwargs):
        asked.append((args, kwargs))
        return str(archive)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    task = set_builder("longbench-vcsum")(request_)
    assert len(task.examples) == 2
    assert asked == [(("THUDM/LongBench", "data.zip"), {"repo_type": "dataset"})]
    with pytest.raises(ValueError, match="expected columns input, context"):
        set_builder("longbench-lcc")(request_)
    with pytest.raises(ValueError, match=r"expected data/trec.jsonl in THUDM/LongBench"):
        set_builder("longbench-trec")(request_)


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "csv"])
def test_ruler_qa_takes_its_set_only(datasets, request_, tokenizer, ending):
    rows = [
        {
            "context": f"Document 1: {i}",
            "question": f"Who is {i}?",
            "answer_prefix": " Answer:",
            "answer": [f"Rome {i}"],
            "task": task,
        }
        for i, task in enumerate(["qa_1", "vt", "qa_2", "qa_1", "qa_2"])
    ]
    write_rows(datasets, request_.data / "rulerqa" / f"4096.{ending}", rows)
    task = set_builder("rulerqa-2-4k")(request_)
    assert [e.questions[0].references for e in task.examples] == [("Rome 2",), ("Rome 4",)]
    assert next(decoded(tokenizer, task)) == ("<s>Document 1: 2", "Who is 2? Answer:")
    assert (task.headline, task.max_new_tokens) == ("string_match_part", 32)
    with pytest.raises(ValueError, match=r"expected one of 8192"):
        set_builder("rulerqa-2-8k")(request_)


def test_the_hub_is_asked_where_the_data_has_no_folder(datasets, request_, monkeypatch):
    asked = []

    def load(*args, **kwargs):
        asked.append((args, kwargs))
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load)
    for name in ("rulerqa-1-8k", "mmlu", "mmlu-anatomy"):
        with pytest.raises(ConnectionError):
            set_builder(name)(replace(request_, data=None))
    assert asked == [
        (("simonjegou/ruler", "8192"), {"split": "test"}),
        (("cais/mmlu", "all"), {"split": "dev"}),
        (("cais/mmlu", "anatomy"), {"split": "dev"}),
    ]


def mmlu_rows(subject: str, count: int) -> list[dict]:
    """The answer to question i is choice i % 4; some choices look like numbers or like nothing."""
    return [
        {
            "question": f"{subject} {i}?",
            "subject": subject,
            "choices": [f"{i}.50", "None", "NA", f"x, {i}"],
            "answer": i % 4,
        }
        for i in range(count)
    ]


def write_authors_files(folder: Path, subject: str, dev: int, test: int) -> None:
    for split, count in (("dev", dev), ("test", test)):
        (folder / split).mkdir(parents=True, exist_ok=True)
        with (folder / split / f"{subject}_{split}.csv").open("w", newline="") as out:
            for row in mmlu_rows(subject, count):
                csv.writer(out).writerow([row["question"], *row["choices"], "ABCD"[row["answer"]]])


@pytest.mark.parametrize("form", ["authors", "jsonl", "parquet", "csv"])
def test_mmlu_five_examples_and_questions_with_choices(datasets, request_, tokenizer, form):
    folder = request_.data / "mmlu"
    if form == "authors":
        write_authors_files(folder, "anatomy", 6, 30)
        write_authors_files(folder, "us_history", 5, 3)
    else:
        for split, counts in (("dev", (6, 5)), ("test", (30, 3))):
            rows = [*mmlu_rows("anatomy", counts[0]), *mmlu_rows("us_history", counts[1])]
            write_rows(datasets, folder / f"{split}.{form}", rows)
    task = set_builder("mmlu")(replace(request_, contexts=9))
    assert (task.kind, task.headline) == ("choice", "mc")
    assert sorted(len(example.questions) for example in task.examples) == [3, 10, 20]
    for example in task.examples:
        text = tokenizer.decode(example.context)
        subject = example.id.split("/")[1]
        assert text.startswith(f"<s>Multiple choice questions about {subject.replace('_', ' ')}")
        assert text.count("Answer:") == 5 and text.endswith("D. x, 4\nAnswer: A")
        for question in example.questions:
            posed = tokenizer.decode(question.prompt)
            number = question.id
            assert posed == (
                f"\n\n{subject} {number}?\nA. {number}.50\nB. None\nC. NA\nD. x, {number}\nAnswer:"
            )
            assert question.right == int(number) % 4
            letters = [tokenizer.decode(answer) for answer in question.answers]
            assert letters == [" A", " B", " C", " D"]
    only = set_builder("mmlu-us_history")(request_)
    assert [example.id.split("/")[1] for example in only.examples] == ["us_history"]
    with pytest.raises(ValueError, match=r"expected 5 examples and a question of law|expected col"):
        set_builder("mmlu-law")(request_)


def test_a_missing_package_is_named_with_its_extra(request_, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError("no datasets here")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for name in ("longbench-lcc", "rulerqa-1-4k", "mmlu"):
        with pytest.raises(ValueError, match=r"pip install 'sparsekv\[eval\]'"):
            set_builder(name)(request_)


def test_names():
    for name in ("longbench-nothing", "rulerqa-3-4k", "rulerqa-1-4096", "mmlu-", "glue"):
        with pytest.raises(ValueError, match="expected"):
            set_builder(name)
    assert set_builder("longbench-repobench-p").length is None
    assert set_builder("longbench-passage_retrieval_en-16k").length == 16_384
