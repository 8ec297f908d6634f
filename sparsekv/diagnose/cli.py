"""`sparsekv diagnose massive`, `sparsekv diagnose attention` and `sparsekv plan`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import sparsekv
from sparsekv import models
from sparsekv.diagnose.activations import Activations, massive
from sparsekv.diagnose.attention_files import write_attention
from sparsekv.diagnose.heads import HeadTable, attention
from sparsekv.diagnose.massive_files import write_massive
from sparsekv.diagnose.planning import LATER, MeasuredPlan, make_plan, write_plan
from sparsekv.diagnose.texts import Text, first_ids, read_texts, stretches, token_texts
from sparsekv.hf.check import known_positions
from sparsekv.options import check_folder, make_folder
from sparsekv.plotting import pyplot
from sparsekv.policies.base import one_of
from sparsekv.policies.budgets import parse_budget
from sparsekv.progress import spinning

_HELP = {"help_option_names": ["-h", "--help"]}
_DIAGNOSE_EXAMPLES = (
    "Examples:\n\nsparsekv diagnose massive --out pictures\n\n"
    "sparsekv diagnose attention --model ./Qwen3-8B --text report.txt --tokens 8192 --out pictures"
)
_PLAN_EXAMPLES = (
    "Examples:\n\nsparsekv plan --keep 0.1 --out plan.json\n\n"
    "sparsekv plan --model ./Qwen3-8B --text a.txt --text b.txt --keep 512 --out plan.json\n\n"
    "sparsekv generate --policy planned --plan plan.json --budget 0.1 --prompt-file report.txt"
)
_TOKENS = 2048  # of a prompt that a plan is made of
_SHOWN = 12  # massive activations that are printed; the file has all

Model = Annotated[
    str | None,
    typer.Option(help="Hugging Face id or local folder; without it, SmolLM2-135M-Instruct."),
]
TextFile = Annotated[
    Path | None, typer.Option("--text", help="A UTF-8 text file; without it, Python's help.")
]
Tokens = Annotated[int, typer.Option(help="Tokens of the text to read, from its start.")]
PromptTokens = Annotated[
    int | None,
    typer.Option(help="Tokens of a prompt; by default 2048, or what the model's positions leave."),
]
PlanFile = Annotated[Path, typer.Option("--out", help="The JSON file to write.")]
Keep = Annotated[
    str, typer.Option(metavar="<int|float>", help="What is kept, as --budget of generate.")
]
TextFiles = Annotated[
    list[Path] | None, typer.Option("--text", help="UTF-8 text files; without one, Python's help.")
]
Later = Annotated[int, typer.Option(help="Tokens after a prompt, whose queries count.")]
Stretches = Annotated[int, typer.Option("--stretches", help="Prompts to take of a text, at most.")]
GoesOn = Annotated[
    bool, typer.Option("--goes-on", help="Later tokens are the text's next, not a part once more.")
]
Measure = Annotated[
    str,
    typer.Option(metavar="<error|mass>", help="What is lost: errors, or attention that is missed."),
]
Per = Annotated[
    str,
    typer.Option(
        metavar="<auto|layer|head>",
        help="One budget a layer, or a head; auto: what loses less.",
    ),
]
Out = Annotated[Path, typer.Option(help="A folder, made if it is not there.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]


def register(app: typer.Typer, user_errors: Callable[..., Any]) -> None:
    """Add the commands. user_errors: decorator that reports a user's mistakes."""
    group = typer.Typer(
        context_settings=_HELP, rich_markup_mode="rich", no_args_is_help=True,
        epilog=_DIAGNOSE_EXAMPLES, help="Look at what a model does with a text.",
    )  # fmt: skip
    group.command("massive", epilog=_DIAGNOSE_EXAMPLES)(user_errors(_massive))
    group.command("attention", epilog=_DIAGNOSE_EXAMPLES)(user_errors(_attention))
    app.add_typer(group, name="diagnose")
    app.command("plan", epilog=_PLAN_EXAMPLES)(user_errors(_plan))


def _massive(
    out: Out,
    text: TextFile = None,
    tokens: Tokens = 1024,
    layer: Annotated[
        int | None, typer.Option(help="The layer to draw; without it, that of the largest number.")
    ] = None,
    magnitude: Annotated[float, typer.Option(help="Massive is larger than this ...")] = 100.0,
    ratio: Annotated[float, typer.Option(help="... and this many times the median.")] = 1000.0,
    model: Model = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Find massive activations, and draw the magnitudes of the hidden states."""
    (read,) = read_texts(None if text is None else [text])
    _folder(out)
    network, tokenizer = _load(model, device, dtype)
    ids = first_ids(tokenizer, read, tokens)
    with spinning(f"{ids.shape[1]} tokens"):
        seen = massive(network, ids, magnitude=magnitude, ratio=ratio, layer=layer)
        names = token_texts(tokenizer, ids)
        files = write_massive(seen, names, out)
    _show_massive(seen, names)
    _written(files)


def _show_massive(seen: Activations, tokens: list[str]) -> None:
    count, places = len(seen.found), len(seen.positions)
    print(f"{count} massive activations at {places} of {len(tokens)} tokens")
    largest = sorted(seen.found, key=lambda one: -abs(one.value))
    for one in sorted(largest[:_SHOWN], key=lambda one: (one.layer, one.position, one.feature)):
        times = abs(one.value) / max(float(seen.median[one.layer]), 1e-30)
        print(
            f"layer {one.layer}, token {one.position} ({tokens[one.position]!r}), feature "
            f"{one.feature}: {one.value:.1f}, {times:.0f} times the median"
        )


def _attention(
    out: Out,
    text: TextFile = None,
    tokens: Tokens = 2048,
    sinks: Annotated[int, typer.Option(help="First tokens whose share is measured.")] = 4,
    recent: Annotated[int, typer.Option(help="Newest tokens whose share is measured.")] = 64,
    top: Annotated[
        list[int] | None,
        typer.Option(help="Numbers of best keys; without it 16, 64, 256 and 1024."),
    ] = None,
    model: Model = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Measure where each head looks: sinks, neighbours, how widely, and what few keys hold."""
    (read,) = read_texts(None if text is None else [text])
    _folder(out)
    network, tokenizer = _load(model, device, dtype)
    ids = first_ids(tokenizer, read, tokens)
    counts = tuple(sorted(set(top))) if top else (16, 64, 256, 1024)
    with spinning(f"{ids.shape[1]} tokens"):
        table = attention(network, ids, sinks=sinks, recent=recent, top=counts)
        files = write_attention(table, out)
    _show_attention(table)
    _written(files)


def _show_attention(table: HeadTable) -> None:
    mass = ", ".join(
        f"{float(table.mass[..., i].mean()):.2f} in the {k} best keys"
        for i, k in enumerate(table.top)
    )
    print(
        f"{table.tokens} tokens, mean of all heads: {float(table.sink_share.mean()):.2f} of the "
        f"attention on the first {table.sinks}, {float(table.locality.mean()):.2f} on the last "
        f"{table.recent}; {mass}; entropy {float(table.entropy.mean()):.2f} nats, "
        f"{float(table.spread.mean()):.2f} of the most"
    )


def _plan(
    out: PlanFile,
    keep: Keep = "0.1",
    files: TextFiles = None,
    tokens: PromptTokens = None,
    later: Later = LATER,
    most: Stretches = 3,
    goes_on: GoesOn = False,
    measure: Measure = "error",
    per: Per = "auto",
    model: Model = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Measure which layers and heads need more of a budget, for --policy planned --plan."""
    budget = parse_budget(keep)
    one_of("per", per, ("auto", "layer", "head"))
    one_of("measure", measure, ("error", "mass"))
    check_folder("--out", out)
    read = read_texts(files)
    network, tokenizer = _load(model, device, dtype)
    known = known_positions(network) or _TOKENS + later
    size = min(_TOKENS, known - later) if tokens is None else tokens
    parts = [stretches(tokenizer, text, size, later, most, repeat=not goes_on) for text in read]
    ids = [one for own in parts for one in own]
    with spinning(f"{len(ids)} prompts of {size} tokens"):
        plan = make_plan(network, ids, keep=budget, later=later, measure=measure, per=per)
    names = {"name": model or models.PACKAGE, "class": type(network).__name__}
    names["dtype"] = str(network.dtype).removeprefix("torch.")
    about: dict[str, Any] = {"sparsekv": sparsekv.__version__, "model": names, "keep": budget}
    about["texts"] = [_told(text, own) for text, own in zip(read, parts, strict=True)]
    about["later_tokens"] = "next of the text" if goes_on else "part of the prompt"
    write_plan(plan, out, about)
    _show_plan(plan)
    _written([out])


def _told(text: Text, parts: list[Any]) -> dict[str, Any]:
    return {"name": text.name, "sha256": text.sha256, "stretches": len(parts)}


def _show_plan(plan: MeasuredPlan) -> None:
    print(f"slots of {plan.tokens}, {plan.budget} a head on average, by {plan.per}:")
    for layer, row in enumerate(plan.slots.tolist()):
        note = " (full)" if layer in plan.full_layers else ""
        print(f"layer {layer}: {' '.join(map(str, row if plan.per == 'head' else row[:1]))}{note}")
    equal, by_layer, by_head = (plan.loss[name] for name in ("uniform", "layer", "head"))
    what = {"error": "error (of that of the window alone)", "mass": "attention missed"}
    print(
        f"{what[plan.measure]} on texts left out: {equal:.4f} with equal budgets, {by_layer:.4f} "
        f"by layer, {by_head:.4f} by head"
    )


def _folder(out: Path) -> None:
    """Before a model is loaded."""
    pyplot("the pictures")
    make_folder("--out", out)


def _load(model: str | None, device: str, dtype: str) -> tuple[Any, Any]:
    with spinning("loading the model"):
        return models.load(model, device, dtype)


def _written(files: list[Path]) -> None:
    for file in files:
        print(f"written: {file}")
