"""The `sparsekv lm-eval` command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from sparsekv import lm_harness


def register(app: typer.Typer, user_errors: Callable[..., Any]) -> None:
    """Add the command to `app`."""

    # Every argument, -h too, belongs to lm-eval.
    @app.command(
        "lm-eval",
        add_help_option=False,
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "help_option_names": [],
        },
        epilog="Example:\n\nsparsekv lm-eval --model sparsekv --model_args "
        "pretrained=Qwen/Qwen3-8B,policy=pyramid,budget=512 --tasks hellaswag",
    )
    @user_errors
    def lm_eval_command(context: typer.Context) -> None:
        """Run lm-eval with the model "sparsekv" in it; all arguments are those of lm_eval."""
        lm_harness.run(context.args)
