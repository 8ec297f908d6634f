"""The 21 subsets of LongBench: what stands around a context, how much is generated, the score.

Order and content of each prompt follow LongBench (instruction, context, instruction again, input,
cue); the wording is our own. Chinese sets are asked in Chinese. LongBench's limits of new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsekv.evaluation import scores
from sparsekv.evaluation.scores import Score


@dataclass(frozen=True)
class Subset:
    """before: text ahead of the context. after: what follows the cut, with {input}.

    classes: the score is of a class among those that a row lists. first_line: what a model writes
    after its first line, another example of the list, is not scored.
    """

    before: str
    after: str
    new_tokens: int
    score: Score | None = None
    classes: bool = False
    first_line: bool = False

    def scorer(self, classes: tuple[str, ...]) -> tuple[str, Score]:
        """(name, score of an answer)."""
        name = "classification" if self.score is None else self.score.__name__
        plain = self.score or _classification(classes)
        return name, scores.first_line(plain) if self.first_line else plain


def _classification(classes: tuple[str, ...]) -> Score:
    def score(text: str, references: tuple[str, ...]) -> float:
        return scores.classification(text, references, classes)

    return score


_SHORT = "Give the answer alone, in as few words as you can, without any explanation."
_READ_PASSAGES = f"Read the passages and answer the question that follows. {_SHORT}\n\nPassages:\n"
_ASK = f"\n\nAnswer the question from the text above. {_SHORT}\n\nQuestion: {{input}}\nAnswer:"
_UNKNOWN = (
    'Write "unanswerable" if the article does not say. Answer a yes/no question by "yes", "no" or '
    '"unanswerable".'
)
_PASSAGES = Subset(_READ_PASSAGES, _ASK, 32, scores.qa_f1)
_CODE = "Continue the code below.\n\n"
_NEXT_LINE = "\n# The next line is:\n"

SUBSETS: dict[str, Subset] = {
    "narrativeqa": Subset(
        f"Read the story, a novel or the script of a film, and answer a question. {_SHORT}\n\n"
        "Story: ",
        _ASK,
        128,
        scores.qa_f1,
    ),
    "qasper": Subset(
        f"Read the scientific article and answer a question. {_SHORT} {_UNKNOWN}\n\nArticle: ",
        f"\n\nAnswer the question from the article above. {_SHORT} {_UNKNOWN}\n\n"
        "Question: {input}\nAnswer:",
        128,
        scores.qa_f1,
    ),
    "multifieldqa_en": Subset(
        "Read the text and answer the question that follows.\n\n", _ASK, 64, scores.qa_f1
    ),
    "multifieldqa_zh": Subset(
        "请先读下面的文章，然后回答一个问题。\n\n",
        "\n\n请根据文章回答，只写答案，越短越好。\n\n问题：{input}\n答案：",
        64,
        scores.qa_f1_zh,
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "dureader": Subset(
        "请先读下面的几篇文章，然后回答一个问题。\n\n文章：",
        "\n\n请根据以上文章回答。\n\n问题：{input}\n答案：",
        128,
        scores.rouge_l_zh,
    ),
    "gov_report": Subset(
        "Read the report of a government office. It is to be summarised in one page.\n\nReport:\n",
        "\n\nSummarise the report in one page.\n\nSummary:",
        512,
        scores.rouge_l,
    ),
    "qmsum": Subset(
        "Read the transcript of a meeting. A question or a request follows.\n\nTranscript:\n",
        "\n\nAnswer from the transcript above in a few sentences.\n\nQuery: {input}\nAnswer:",
        512,
        scores.rouge_l,
    ),
    "multi_news": Subset(
        "Read the news articles. They are to be summarised together in one page.\n\nNews:\n",
        "\n\nSummarise all of the news in one page.\n\nSummary:",
        512,
        scores.rouge_l,
    ),
    "vcsum": Subset(
        "请读下面的会议记录，然后总结会议内容。\n\n会议记录：\n",
        "\n\n请写出会议内容的总结。\n\n总结：",
        512,
        scores.rouge_l_zh,
    ),
    "trec": Subset(
        "Say of which type a question is. First come examples.\n\n",
        "\n{input}",
        64,
        classes=True,
        first_line=True,
    ),
    "triviaqa": Subset(
        f"Answer the question from its passage. {_SHORT} First come examples.\n\n",
        "\n\n{input}",
        32,
        scores.qa_f1,
        first_line=True,
    ),
    "samsum": Subset(
        "Summarise the dialogue in a few short sentences. First come examples.\n\n",
        "\n\n{input}",
        128,
        scores.rouge_l,
        first_line=True,
    ),
    "lsht": Subset(
        "请指出一条新闻属于哪一类。先看例子。\n\n",
        "\n{input}",
        64,
        classes=True,
        first_line=True,
    ),
    "passage_count": Subset(
        "Some of the paragraphs below are copies of others. Count how many different ones there "
        "are.\n\n",
        "\n\nHow many different paragraphs are there, copies not counted? Write the number alone."
        "\n\nAnswer:",
        32,
        scores.count,
    ),
    "passage_retrieval_en": Subset(
        "Below are thirty numbered paragraphs. One of them is the source of a summary.\n\n",
        "\n\nSummary:\n{input}\n\nFrom which paragraph is the summary? Answer in the form "
        '"Paragraph 1".\n\nAnswer:',
        32,
        scores.retrieval,
    ),
    "passage_retrieval_zh": Subset(
        "下面是若干编号的段落，其中一段是某个摘要的来源。\n\n",
        "\n\n摘要：\n{input}\n\n这个摘要来自哪一段？请用“段落1”的形式回答。\n\n答案：",
        32,
        scores.retrieval,
    ),
    "lcc": Subset(_CODE, _NEXT_LINE, 64, scores.code_similarity),
    "repobench-p": Subset(_CODE, "{input}" + _NEXT_LINE, 64, scores.code_similarity),
}
