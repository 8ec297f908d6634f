"""`sparsekv serve`: its options. vLLM is imported when it runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

_EPILOG = (
    "Examples:\n\nsparsekv serve meta-llama/Llama-3.1-8B-Instruct --policy layersplit\n\n"
    "sparsekv serve ./model --policy streaming --budget 512 --option sinks=128 --port 8001\n\n"
    "All other options are vLLM's and go to its server."
)
Prefill = Annotated[
    str, typer.Option(help="dense: a prompt is read in full, then cut. chunked: cut at each chunk.")
]


def register(app: typer.Typer, user_errors: Callable[..., Any]) -> None:
    """Add the command to `app`."""
    app.command(
        "serve",
        epilog=_EPILOG,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(user_errors(serve))


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Hugging Face id or local folder.")],
    policy: Annotated[
        str,
        typer.Option(help="streaming, snapkv, pyramid, layersplit, h2o, tova, or full (dense)."),
    ] = "layersplit",
    budget: Annotated[int, typer.Option(help="Tokens kept per sparse layer and KV head.")] = 1024,
    full_layers: Annotated[int, typer.Option(help="First layers, which keep all.")] = 3,
    recent: Annotated[
        int | None, typer.Option(help="Newest tokens always kept, of the budget.")
    ] = None,
    prefill: Prefill = "dense",
    block_size: Annotated[int, typer.Option(help="Tokens a block of vLLM's cache.")] = 32,
    option: Annotated[
        list[str] | None, typer.Option(help="A hyper-parameter of the policy: name=value.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and the command, start nothing.")
    ] = False,
) -> None:
    """Serve a model with a sparse KV cache: vLLM's OpenAI server with the plugin switched on."""
    from sparsekv.vllm.arguments import check_installed, llm_kwargs
    from sparsekv.vllm.launch import command, plan

    check_installed()
    options = dict(parse_option(text) for text in option or ())
    if own := sorted(set(options) & set(context.params)):
        raise ValueError(f"expected --option with a hyper-parameter of the policy, got {own}")
    kwargs = llm_kwargs(
        model, policy=policy, budget=budget, full_layers=full_layers, recent=recent,
        prefill=prefill, block_size=block_size, **options,
    )  # fmt: skip
    print(plan(kwargs), flush=True)
    line = command(kwargs, context.args)
    if dry_run:
        print(" ".join(line))
        return
    os.execv(line[0], line)


def parse_option(text: str) -> tuple[str, int | float | str]:
    """ "sinks=128" -> ("sinks", 128); ValueError for what has no name and value."""
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ValueError(f"expected --option name=value, got {text!r}")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value
