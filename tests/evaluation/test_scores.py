"""Scores against values worked out by hand, and against rouge-score where it is installed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.evaluation import scores


def test_string_match_all_is_the_share_and_ignores_case():
    assert scores.string_match_all("It is 12, then ABC.", ("12", "abc", "nine", "7")) == 0.5


def test_string_match_part_takes_any():
    assert scores.string_match_part("the Rhine", ("Danube", "rhine")) == 1.0
    assert scores.string_match_part("the Elbe", ("Danube", "rhine")) == 0.0


def test_qa_f1_drops_articles_punctuation_and_case():
    # {cat, sat, down} and {cat, sat}: precision 2/3, recall 1, F1 0.8.
    assert scores.qa_f1("The cat, sat down!", ("a cat SAT",)) == pytest.approx(0.8)
    assert scores.qa_f1("dog", ("cat", "dog")) == 1.0
    assert scores.qa_f1("", ("cat",)) == 0.0
    # One common of bags {no, no, no} and {no}: precision 1/3, recall 1.
    assert scores.qa_f1("no no no", ("no",)) == pytest.approx(0.5)


def test_qa_f1_zh_counts_characters():
    # 北京 in 在北京。: two of three characters, both found: 2 * 2 / (3 + 2).
    assert scores.qa_f1_zh("在北京。", ("北京",)) == pytest.approx(0.8)
    assert scores.qa_f1_zh("2008年", ("2008年",)) == 1.0


def test_rouge_l_is_in_order():
    # LCS of "police killed the gunman" and "the gunman killed police": "the gunman", 2 of 4 and 4.
    assert scores.rouge_l("Police killed the gunman.", ("the gunman killed police",)) == 0.5
    # 上午开会 is a subsequence of 上午九点开会: 2 * 4 / (4 + 6).
    assert scores.rouge_l_zh("上午开会", ("上午九点开会",)) == pytest.approx(0.8)


def test_count_and_retrieval_take_the_share_of_the_numbers():
    assert scores.count("I count 12, or 13", ("12",)) == 0.5
    assert scores.count("112", ("12",)) == 0.0
    assert scores.count("many", ("12",)) == 0.0
    assert scores.retrieval("Paragraph 7, not 8 nor 9", ("Paragraph 7",)) == pytest.approx(1 / 3)
    assert scores.retrieval("段落3", ("段落3",)) == 1.0
    with pytest.raises(ValueError, match="expected a number in every reference"):
        scores.retrieval("7", ("Paragraph",))


def test_code_similarity_reads_the_first_line_of_code():
    text = "\n\n```python\n# comment\nx = 1\ny = 2"
    assert scores.code_similarity(text, ("x = 1",)) == 1.0
    # "x = 12" and "x = 1": LCS 5, 2 * 5 / 11.
    assert scores.code_similarity("x = 12", ("x = 1",)) == pytest.approx(10 / 11)
    assert scores.code_similarity("# nothing else", ("x",)) == 0.0


def test_classification_splits_among_the_classes_named():
    classes = ("Date", "Distance", "Other number", "number")
    assert scores.classification("Date or Distance", ("Date",), classes) == 0.5
    assert scores.classification("Date", ("Distance",), classes) == 0.0
    # "number" is part of the right name and does not count beside it.
    assert scores.classification("Other number", ("Other number",), classes) == 1.0
    # But it does beside a name that it is no part of.
    assert scores.classification("Date, number", ("Date",), classes) == 0.5


def test_first_line_skips_empty_lines_in_front():
    scored = scores.first_line(scores.qa_f1)
    assert scored("\n\nParis\nPassage: more text", ("Paris",)) == 1.0


def plain_lcs(a, b):
    row = [0] * (len(b) + 1)
    for x in a:
        old, row = row, [0]
        for j, y in enumerate(b):
            row.append(old[j] + 1 if x == y else max(old[j + 1], row[j]))
    return row[-1]


@given(st.text("abc", max_size=12), st.text("abc", max_size=12))
def test_lcs_is_the_textbook_table(a, b):
    assert scores.lcs(a, b) == plain_lcs(a, b)


@given(st.text("ab c.1", max_size=30), st.text("ab c.1", max_size=30))
def test_rouge_l_is_rouge_score(a, b):
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    expected = scorer.score(b, a)["rougeL"].fmeasure
    assert scores.rouge_l(a, (b,)) == pytest.approx(expected)
