"""The `sparsekv` command and all of its parts.

Text goes to stdout; progress and figures go to stderr. A user's mistake is one line,
`error: expected X, got Y`, and exit code 2.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

import sparsekv
from sparsekv import models, show_kept
from sparsekv.bench.cli import register as register_bench
from sparsekv.catalogue import markdown as policies_markdown
from sparsekv.demo import prompt as demo_prompt
from sparsekv.demo import run_demo
from sparsekv.diagnose.cli import register as register_diagnose
from sparsekv.diagnose.texts import read_file
from sparsekv.evaluation.cli import register as register_eval
from sparsekv.generation import Run, encode, generate_shown
from sparsekv.kernels._quant import check_kv_dtype
from sparsekv.lm_harness.cli import register as register_lm_eval
from sparsekv.options import check_folder
from sparsekv.plotting import pyplot
from sparsekv.policies import Duo, Planned, get_policy
from sparsekv.policies.budgets import parse_budget
from sparsekv.progress import spinning
from sparsekv.vllm.cli import register as register_serve

HELP = {"help_option_names": ["-h", "--help"]}
APP = typer.Typer(
    help="KV-cache sparsity for LLM inference: keep the tokens that matter, free the others.",
    epilog="Examples:\n\nsparsekv demo\n\nsparsekv policies\n\n"
    'sparsekv generate --prompt "Why is the sky blue?"',
    context_settings=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
GENERATE_EXAMPLES = (
    "Examples:\n\n"
    'sparsekv generate --prompt "Why is the sky blue?" --budget 64\n\n'
    "sparsekv generate --prompt-file report.txt --policy snapkv --budget 0.25 --compare\n\n"
    "sparsekv generate --model ./Qwen3-8B --device cuda --prompt-file book.txt --json run.json"
)

Model = Annotated[
    str | None,
    typer.Option(help="Hugging Face id or local folder; without it, SmolLM2-135M-Instruct."),
]
Policy = Annotated[str, typer.Option(help="A name that `sparsekv policies` lists.")]
Gates = Annotated[
    Path | None,
    typer.Option(help="For duo: a file of gates, .json or the .tsv that its authors publish."),
]
Plan = Annotated[Path | None, typer.Option(help="For planned: a file that `sparsekv plan` wrote.")]
Budget = Annotated[
    str,
    typer.Option(
        metavar="<int|float>",
        help="Tokens kept per layer and KV head (512), or the fraction kept (0.25).",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
PromptFile = Annotated[
    Path | None, typer.Option(help="A UTF-8 text file with the prompt.", show_default=False)
]
KVDtype = Annotated[
    str | None,
    typer.Option(help="Quantise the cache: fp8_e4m3, fp8_e5m2, int8 or int4.", show_default=False),
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]


def user_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn what a user can get wrong into one line and exit code 2."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (ValueError, OSError) as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(2) from error

    return run


def main() -> None:
    """Entry point. Mistakes in the options themselves are reported like all others."""
    command = typer.main.get_command(APP)
    try:
        code = command.main(prog_name="sparsekv", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:
        # click's usage errors, whichever click typer was built on.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()
        if message:
            print(f"error: {message}", file=sys.stderr)
        sys.exit(2)
    sys.exit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sparsekv {sparsekv.__version__}")
        raise typer.Exit


@APP.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """KV-cache sparsity for LLM inference: keep the tokens that matter, free the others."""
    # Their bars and notes would cut through ours.
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@APP.command("generate", epilog=GENERATE_EXAMPLES)
@user_errors
def generate_command(
    model: Model = None,
    policy: Policy = "pyramid",
    budget: Budget = "512",
    gates: Gates = None,
    plan: Plan = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    prompt_file: PromptFile = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the prompt as it is: no chat template.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run the same prompt with a dense cache.")
    ] = False,
    kv_dtype: KVDtype = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write texts, tokens, times and cache figures.")
    ] = None,
) -> None:
    """Generate greedily from a prompt with a sparse KV cache."""
    chosen, size = read_policy(policy, gates, plan), parse_budget(budget)
    text = _read_prompt(prompt, prompt_file)
    _check_before_work(max_new_tokens, json_file, kv_dtype)
    with spinning("loading the model"):
        network, tokenizer = models.load(model, device, dtype)
    ids = encode(tokenizer, text, chat=not raw)
    run = functools.partial(generate_shown, network, tokenizer, ids, max_new_tokens)
    dense = run("dense") if compare else None
    with spinning("checking the model"):
        sparsekv.patch(network, chosen.with_tokenizer(tokenizer), size, kv_dtype=kv_dtype)
    sparse = run(policy)
    _show(sparse, dense, policy)
    if json_file is not None:
        setting = {"model": model or models.PACKAGE, "policy": policy, "budget": size}
        setting |= {"device": str(network.device), "dtype": str(network.dtype)}
        setting |= {"prompt_tokens": ids.shape[1], "max_new_tokens": max_new_tokens}
        _write_json(json_file, setting, sparse, dense)


def _write_json(file: Path, setting: dict[str, Any], sparse: Run, dense: Run | None) -> None:
    runs = {"sparse": sparse.to_dict(), "dense": dense.to_dict() if dense else None}
    file.write_text(json.dumps(setting | runs, indent=2) + "\n", encoding="utf-8")


def read_policy(
    name: str, gates: Path | None = None, plan: Path | None = None
) -> sparsekv.policies.Policy:
    """The policy of that name, with the gates or the plan of a file if it takes one.

    Raises:
        ValueError: no such policy, a file for another one, or none for one that wants it.
    """
    for option, file, cls in (("gates", gates, Duo), ("plan", plan, Planned)):
        if file is None and name == cls.name:
            maker = f"`sparsekv {option} --out FILE` makes one"
            raise ValueError(f"expected --{option} FILE with --policy {name}, got none: {maker}")
        if file is None:
            continue
        if name != cls.name:
            raise ValueError(f"expected --{option} with --policy {cls.name}, got --policy {name}")
        if not file.is_file():
            raise ValueError(f"expected --{option} to be a file, got none at {str(file)!r}")
        return cls.load(file)
    return get_policy(name)


def _check_before_work(max_new_tokens: int, json_file: Path | None, kv_dtype: str | None) -> None:
    """What would otherwise be found out after a minute."""
    check_kv_dtype(kv_dtype)
    if max_new_tokens < 1:
        raise ValueError(f"expected --max-new-tokens >= 1, got {max_new_tokens}")
    if json_file is not None:
        check_folder("--json", json_file)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise ValueError(f"expected --prompt or --prompt-file, got {'both' if file else 'neither'}")
    if file is None:
        return str(prompt)
    return read_file(file)


def _show(sparse: Run, dense: Run | None, policy: str) -> None:
    """Texts on stdout, figures on stderr."""
    if dense is not None:
        print(f"--- dense\n{dense.text}\n--- {policy}")
    print(sparse.text)
    print(sparse.figures, file=sys.stderr)
    for name, run in (("dense", dense), (policy, sparse)):
        if run is not None:
            rate = f"{(len(run.tokens) - 1) / run.decode_s:.1f} tokens/s" if run.decode_s else ""
            seconds = f"{name}: {run.prefill_s:.2f} s to the first token, {run.decode_s:.2f} s for"
            print(f"{seconds} {len(run.tokens) - 1} more {rate}", file=sys.stderr)


@APP.command(epilog="Examples:\n\nsparsekv policies\n\nsparsekv policies --markdown")
def policies(
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/policies.md: everything about each.")
    ] = False,
) -> None:
    """List the policies: what each keeps, its hyper-parameters with defaults, its paper."""
    if as_markdown:
        print(policies_markdown(), end="")
        return
    table = Table("policy", "keeps", "hyper-parameters", "paper", show_lines=True)
    for name, policy in sparsekv.POLICIES.items():
        values = get_policy(name)
        fields = (f"{f.name}={getattr(values, f.name)}" for f in dataclasses.fields(policy))
        table.add_row(name, policy.keeps, "\n".join(fields), policy.paper)
    Console().print(table)


@APP.command(
    "show-kept",
    epilog="Examples:\n\nsparsekv show-kept --policy snapkv --budget 512 --out kept.png\n\n"
    "sparsekv show-kept --policy h2o --model ./Qwen3-8B --prompt report.txt --heads",
)
@user_errors
def show_kept_command(
    policy: Policy = "pyramid",
    budget: Budget = "512",
    gates: Gates = None,
    plan: Plan = None,
    model: Model = None,
    prompt: Annotated[
        Path | None, typer.Option(help="A UTF-8 text file; without it, the text of the demo.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("kept.png"),
    heads: Annotated[bool, typer.Option("--heads", help="A row a KV head, not a layer.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Draw which tokens of a prompt a policy keeps, layer by layer."""
    chosen, size = read_policy(policy, gates, plan), parse_budget(budget)
    text = demo_prompt() if prompt is None else _read_prompt(None, prompt)
    pyplot("the picture")  # before the model is loaded
    check_folder("--out", out)
    if out.suffix.lower() != ".png":
        raise ValueError(f"expected --out to end in .png, got {str(out)!r}")
    with spinning("loading the model"):
        network, tokenizer = models.load(model, device, dtype)
    ids = encode(tokenizer, text, chat=False)
    print(show_kept.show_kept(network, tokenizer, ids, chosen, size, out, by_head=heads))


@APP.command(epilog="Examples:\n\nsparsekv gates --texts report.txt --out gates.json")
@user_errors
def gates(
    out: Annotated[Path, typer.Option(help="The JSON file to write.")],
    texts: Annotated[
        list[Path] | None, typer.Option(help="UTF-8 text files; without one, the demo's text.")
    ] = None,
    model: Model = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Measure on texts which heads the policy duo may let stream, for --policy duo --gates."""
    check_folder("--out", out)
    read = [_read_prompt(None, file) for file in texts or ()] or [demo_prompt()]
    with spinning("loading the model"):
        network, tokenizer = models.load(model, device, dtype)
    with spinning("measuring the heads"):
        duo = sparsekv.calibrate_duo(network, read, tokenizer=tokenizer)
    duo.save(out)
    print(f"written: {out}")


@APP.command(epilog="Examples:\n\nsparsekv demo\n\nsparsekv demo --policy snapkv --budget 256")
@user_errors
def demo(
    policy: Policy = "pyramid",
    budget: Budget = "512",
    gates: Gates = None,
    plan: Plan = None,
    kv_dtype: KVDtype = None,
    model: Model = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Ask about one fact in a long text, with a dense and with a sparse KV cache."""
    chosen, size = read_policy(policy, gates, plan), parse_budget(budget)
    check_kv_dtype(kv_dtype)
    with spinning("loading the model"):
        network, tokenizer = models.load(model, device, dtype)
    run_demo(network, tokenizer, chosen, size, kv_dtype)


register_diagnose(APP, user_errors)
register_bench(APP, user_errors)
register_eval(APP, user_errors, parse_budget)
register_lm_eval(APP, user_errors)
register_serve(APP, user_errors)
