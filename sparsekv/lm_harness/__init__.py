"""Patched models inside EleutherAI's lm-evaluation-harness: `sparsekv lm-eval`.

lm-eval finds models in a registry of its own and looks for no plug-ins, so `lm_eval` alone does not
know the model "sparsekv". `sparsekv lm-eval` takes the arguments of `lm_eval` and puts it there
first; a program does the same by `sparsekv.lm_harness.register()`. Needs `pip install
'sparsekv[eval]'`; nothing of lm-eval is imported before it is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

NAME = "sparsekv"


def register() -> None:
    """Make lm-eval know the model "sparsekv". Doing it again changes nothing.

    Raises:
        ValueError: lm-eval is not installed.
    """
    try:
        from lm_eval.api.registry import MODEL_REGISTRY, register_model
        from lm_eval.models.huggingface import HFLM  # noqa: F401  # registers lm-eval's own models
    except (ImportError, AttributeError) as error:  # older ones want names transformers has lost
        raise ValueError(
            f"expected the package lm-eval >= 0.4.10, got none that works ({error}): "
            f"pip install 'sparsekv[eval]'"
        ) from error
    if NAME not in MODEL_REGISTRY:
        from sparsekv.lm_harness.model import SparseHFLM

        register_model(NAME)(SparseHFLM)


def run(arguments: Sequence[str]) -> None:
    """lm-eval's own command line with these arguments; it may end the program."""
    register()
    from lm_eval.__main__ import cli_evaluate

    # Its parser reads sys.argv and nothing else.
    before, sys.argv = sys.argv, ["lm_eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
