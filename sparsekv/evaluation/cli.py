"""`sparsekv eval`: its options, and what it prints. What is heavy is imported when it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from sparsekv.evaluation.served_cli import served

if TYPE_CHECKING:
    from sparsekv.evaluation.results import Results
    from sparsekv.evaluation.session import Session
    from sparsekv.evaluation.wish import Wish

_EXAMPLES = (
    "Examples:\n\nsparsekv eval --smoke --data ../shared/data\n\n"
    "sparsekv eval --full --policies all --data data --device cuda --out results\n\n"
    "sparsekv eval --tasks needle-1k,icl-1k --budgets 64,0.25 --samples 20 --data data\n\n"
    "sparsekv eval table results-1 results-2 --out results --against snapkv"
)
_SERVED = (
    "Examples:\n\nsparsekv eval served --base-url http://localhost:8000/v1 --out dense\n\n"
    "sparsekv eval served --base-url http://localhost:8001/v1 --policy layersplit --budget 1024 "
    "--out sparse\n\nsparsekv eval table dense sparse --out both"
)
_HELP = {"help_option_names": ["-h", "--help"]}

Model = Annotated[
    str | None,
    typer.Option(help="Hugging Face id or local folder; without it, SmolLM2-135M-Instruct."),
]
Policies = Annotated[str, typer.Option(help="Comma-separated, or all. full is always measured.")]
Budgets = Annotated[
    str | None,
    typer.Option(help="Comma-separated, as in generate. 256 in smoke, 64,128,256,512 in full."),
]
Tasks = Annotated[str | None, typer.Option(help="Comma-separated, or all; by default the mode's.")]
Protocol = Annotated[str, typer.Option(help="question-aware, question-agnostic or both.")]
Data = Annotated[Path | None, typer.Option(help="The folder with prose, code, qa and mc.")]
Samples = Annotated[
    int | None, typer.Option(help="Contexts a task; by default the mode's for each task.")
]
Full = Annotated[bool, typer.Option("--full/--smoke", help="The mode: which tasks and how much.")]
Out = Annotated[Path, typer.Option(help="Folder for the results and the table.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the results in --out.")]
Seconds = Annotated[
    float | None, typer.Option(help="Begin no forward later; --resume goes on from there.")
]
BatchTokens = Annotated[
    int | None, typer.Option(help="Tokens of one forward: 8192 on a CPU, by its memory on a GPU.")
]
Feed = Annotated[
    str, typer.Option(help="chunk: answers in one forward; steps: token by token, as decoding.")
]
Gates = Annotated[
    Path | None, typer.Option(help="Gates for duo; without, they are measured on the data.")
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", help="A plan for planned; without, one is made of Python's help."),
]
Commit = Annotated[
    str | None, typer.Option(help="Recorded commit, where there is no git history to ask.")
]


class _RunByDefault(TyperGroup):
    """`sparsekv eval --smoke` is `sparsekv eval run --smoke`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the command where the first argument is an option."""
        if not args or (args[0].startswith("-") and args[0] not in _HELP["help_option_names"]):
            args = ["run", *args]
        return super().parse_args(ctx, args)


def register(
    app: typer.Typer, user_errors: Callable[..., Any], parse_budget: Callable[[str], int | float]
) -> None:
    """Add `eval` to the command line. user_errors: decorator that reports a user's mistakes."""
    group = typer.Typer(
        cls=_RunByDefault, context_settings=_HELP, rich_markup_mode="rich", epilog=_EXAMPLES,
        help="Evaluate policies beside a dense cache: accuracy, kept tokens, bytes, time.",
    )  # fmt: skip
    group.command("run", epilog=_EXAMPLES)(user_errors(_runner(parse_budget)))
    group.command("table", epilog=_EXAMPLES)(user_errors(table))
    group.command("served", epilog=_SERVED)(user_errors(served))
    app.add_typer(group, name="eval")


def _runner(parse_budget: Callable[[str], int | float]) -> Callable[..., None]:
    def run(
        model: Model = None,
        device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
        dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
        policies: Policies = "full,streaming,snapkv,pyramid,layersplit",
        budgets: Budgets = None,
        tasks: Tasks = None,
        protocol: Protocol = "both",
        data: Data = None,
        samples: Samples = None,
        seed: Annotated[int, typer.Option(help="Of everything drawn.")] = 0,
        full: Full = False,
        out: Out = Path("sparsekv-eval"),
        resume: Resume = False,
        seconds: Seconds = None,
        batch_tokens: BatchTokens = None,
        feed: Feed = "chunk",
        gates: Gates = None,
        plan: PlanFile = None,
        commit: Commit = None,
    ) -> None:
        """Measure policies on tasks; write results, their table and the frontier plot."""
        from sparsekv.evaluation.wish import check_wish

        mode = "full" if full else "smoke"
        wish = check_wish(
            policies, budgets, tasks, protocol, parse_budget, mode=mode, samples=samples,
            seed=seed, data=data, gates=gates, plan=plan, feed=feed,
        )  # fmt: skip
        if batch_tokens is not None and batch_tokens < 1:
            raise ValueError(f"expected --batch-tokens >= 1, got {batch_tokens}")
        deadline = time.monotonic() + (float("inf") if seconds is None else seconds)
        measure(wish, model, device, dtype, out, resume, batch_tokens, commit, deadline)

    return run


def measure(
    wish: Wish,
    model: str | None,
    device: str,
    dtype: str,
    out: Path,
    resume: bool,
    batch_tokens: int | None,
    commit: str | None,
    deadline: float,
) -> None:
    """Load, make the tasks, run until the deadline (of time.monotonic), and write the table."""
    from sparsekv import models
    from sparsekv.bench.machine import describe
    from sparsekv.evaluation.results import Results
    from sparsekv.evaluation.runner import default_batch_tokens
    from sparsekv.evaluation.session import Session, build_tasks, config_of, too_long
    from sparsekv.progress import spinning

    with spinning("loading the model"):
        network, tokenizer = models.load(model, device, dtype)
    with spinning("making the tasks"):
        made = build_tasks(wish, tokenizer)
    for line in too_long(made, network):
        print(f"beware: {line}")
    tokens = batch_tokens or default_batch_tokens(network)
    about = describe(network.device, commit) | {"batch_tokens": tokens}
    name = model or models.PACKAGE
    config = config_of(wish, made, {"model": name, "dtype": dtype}, about)
    with Results(out, config, resume=resume) as results:
        with spinning("checking the policies"):
            session = Session.begin(wish, network, tokenizer, made, name, results)
        whole = _fill(session, results, tokens, deadline)
    if not whole:
        print("time is up: with --resume the same command goes on")
    write_table([out], out)


def _fill(session: Session, results: Results, batch_tokens: int, deadline: float) -> bool:
    """Run everything under one progress bar, or what there is time for; whether all is done."""
    from sparsekv.progress import counting

    with counting("starting", session.tasks[0].name, session.total) as steps:
        for task, count in session.fill(results, batch_tokens):
            steps.description = task
            steps.step(count)
            if time.monotonic() > deadline:
                return False
    return True


def table(
    folders: Annotated[list[Path], typer.Argument(help="Folders that sparsekv eval has written.")],
    out: Annotated[Path, typer.Option(help="Folder for the table.")] = Path("."),
    against: Annotated[
        str | None,
        typer.Option(help="A policy that all others are compared with, in a table of its own."),
    ] = None,
    common: Annotated[
        bool, typer.Option("--common", help="Only questions that every setting has answered.")
    ] = False,
) -> None:
    """Make one table of several folders, such as shards by policy of one evaluation."""
    write_table(folders, out, against, common)


def write_table(
    folders: list[Path], out: Path, against: str | None = None, common: bool = False
) -> None:
    """Tables and the frontier plot of these folders, into `out`; their paths are printed."""
    from sparsekv.evaluation import against as beside
    from sparsekv.evaluation import cells as made
    from sparsekv.evaluation.frontier import points
    from sparsekv.evaluation.lines import averages
    from sparsekv.evaluation.plots import draw_frontier
    from sparsekv.evaluation.table import write

    cells, configs = made.merged(folders)
    if common:
        cells = made.common(cells)
    for path in write(cells, configs, out):
        print(f"written: {path}")
    if against is not None:
        print(f"written: {beside.write(beside.differences(cells, against), against, out)}")
    found = points(averages(cells))
    try:
        title = f"{configs[0].get('model')}, seed {configs[0].get('seed')}"
        print(f"written: {draw_frontier(found, title, out / 'frontier.png')}")
    except ValueError as error:  # the figures are safe; only the plot is missing
        print(f"plot not drawn: {error}")
