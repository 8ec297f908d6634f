"""Pieces of a prompt, put together by token ids, are the tokens of the text in one piece."""

from __future__ import annotations

import string
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sparsekv.evaluation.ruler import fitting
from sparsekv.evaluation.texts import encode, opening

PIECES = ("Read this.\n\n", "The word is tiger.", "\n\nQuestion: which?\nAnswer:", " tiger")


def tokenizer(kind: str) -> Any:
    """A character a token. kind: how spaces are written, and what stands before a text."""
    space = "Ġ" if kind == "bytes" else "▁"
    characters = [*string.ascii_letters, *string.punctuation, "\n", "Ċ", space, "<a>", "<b>"]
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, []))
    if kind == "bytes":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "prepended":  # Llama 2, Mistral, Phi 3
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(steps)
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
    marks = [(mark, characters.index(mark)) for mark in ("<a>", "<b>")]
    made.post_processor = processors.TemplateProcessing("<a> <b> $A", special_tokens=marks)
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("kind", ["bytes", "prepended", "always", "first", "never"])
def test_pieces_make_the_whole(kind):
    """No space before a piece but its own, and every special token before the first: else an
    answer begins with a token that no model says, and its score is 0."""
    made = tokenizer(kind)
    whole = made("".join(PIECES))["input_ids"]
    first, *rest = PIECES
    assert opening(made, first) + [i for piece in rest for i in encode(made, piece)] == whole
    assert made.convert_ids_to_tokens(whole)[:2] == ["<a>", "<b>"]
    assert fitting.encode(made, first, first=True) == tuple(opening(made, first))
    assert encode(made, "") == [] and opening(made, "") == whole[:2]
