"""`sparsekv bench`: its options, and what it prints. What is heavy is imported when it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from sparsekv.bench.serve.cli import EXAMPLES as SERVE_EXAMPLES
from sparsekv.bench.serve.cli import serve
from sparsekv.options import make_folder

if TYPE_CHECKING:
    from sparsekv.bench.case import Context
    from sparsekv.bench.results import Row

SELECTIONS = {
    "all": "Every group. What `sparsekv bench` means without a name.",
    "kernels": "Every kernel: decode, prefill, cache and statistics.",
    "decode": "Paged decode attention, with and without probabilities, kept parts.",
    "prefill": "Prefill attention with its log-sum-exp, window scores, scores of all rows.",
    "cache": "Append, compact, top-k.",
    "statistics": "What policies score with: time of some of it, peak memory of all.",
    "generate": "Time to the first token and a token of `generate`, time a token by context.",
    "policies": "Every policy on one long prompt: prefill, time a token, KV memory, peak.",
    "memory": "KV memory after prefill, peak, longest prompt in 24 GiB.",
}
_EXAMPLES = (
    "Examples:\n\nsparsekv bench --quick --device cpu\n\n"
    "sparsekv bench kernels --out results/today\n\n"
    "sparsekv bench all --seconds 330 --only 'prefill attention,time to first'\n\n"
    "sparsekv bench table results/today --readme benchmarks/README.md"
)
_HELP = {"help_option_names": ["-h", "--help"]}

Quick = Annotated[
    bool, typer.Option("--quick", help="One round a case; on a CPU tiny shapes (needed there).")
]
Out = Annotated[Path, typer.Option(help="Folder for results.json, results.csv and the plots.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Commit = Annotated[
    str | None, typer.Option(help="Recorded commit, where there is no git history to ask.")
]
Seconds = Annotated[
    float | None, typer.Option(help="Begin no case later; the rest is reported as not run.")
]
Only = Annotated[
    str | None, typer.Option(help="Comma-separated parts of case names (or patterns); run these.")
]
KvpressPython = Annotated[
    str | None, typer.Option(help="A Python (or a script that starts one) that has kvpress.")
]
VllmSite = Annotated[str | None, typer.Option(help="A folder of packages that has vLLM.")]


class _AllByDefault(TyperGroup):
    """`sparsekv bench --quick` is `sparsekv bench all --quick`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the selection where the first argument is an option."""
        if not args or (args[0].startswith("-") and args[0] not in _HELP["help_option_names"]):
            args = ["all", *args]
        return super().parse_args(ctx, args)


def register(app: typer.Typer, user_errors: Callable[..., Any]) -> None:
    """Add `bench` to the command line. user_errors: decorator that reports a user's mistakes."""
    bench = typer.Typer(
        cls=_AllByDefault, context_settings=_HELP, rich_markup_mode="rich", epilog=_EXAMPLES,
        help="Measure ours beside its peers, against this machine's own ceilings.",
    )  # fmt: skip
    for name, text in SELECTIONS.items():
        bench.command(name, help=text, epilog=_EXAMPLES)(user_errors(_runner(name)))
    bench.command("serve", epilog=SERVE_EXAMPLES)(user_errors(serve))
    bench.command("table", epilog=_EXAMPLES)(user_errors(table))
    bench.command("plot", epilog=_EXAMPLES)(user_errors(plot))
    app.add_typer(bench, name="bench")


def _runner(selection: str) -> Callable[..., None]:
    def run(
        quick: Quick = False,
        out: Out = Path("sparsekv-bench"),
        device: Device = "auto",
        commit: Commit = None,
        seconds: Seconds = None,
        only: Only = None,
        kvpress_python: KvpressPython = None,
        vllm_site: VllmSite = None,
    ) -> None:
        context = _context(device, quick)
        context.kvpress_python, context.vllm_site = kvpress_python, vllm_site
        measure(selection, context, out, commit, seconds, only)

    return run


def _context(device: str, quick: bool) -> Context:
    """Raises ValueError for a device that is not there, or a CPU without --quick."""
    import torch

    from sparsekv.bench.case import Context

    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        chosen = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"expected --device auto, cpu or cuda, got {device!r}") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"expected --device auto, cpu or cuda, got {device!r}")
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"expected a CUDA device for --device {device}, got none")
        if chosen.index is not None:
            torch.cuda.set_device(chosen)
        return Context(chosen, rounds=1 if quick else 3, rep_ms=30.0 if quick else 60.0)
    if not quick:
        raise ValueError("expected --quick on a CPU, which measures nothing of worth, got none")
    return Context(chosen, tiny=True, rounds=1)


def measure(
    selection: str,
    context: Context,
    out: Path,
    commit: str | None,
    seconds: float | None,
    only: str | None,
) -> None:
    """Run a selection, print a line a row, write the files."""
    from sparsekv.bench.machine import describe
    from sparsekv.bench.plots import draw
    from sparsekv.bench.registry import cases
    from sparsekv.bench.results import read
    from sparsekv.bench.runner import Run
    from sparsekv.progress import counting

    chosen = cases(selection, context.tiny, only)
    make_folder("--out", out)
    with counting("starting", "measuring", len(chosen) + 1) as steps:

        def before(name: str) -> None:
            steps.description = name
            steps.step()

        run = Run(context, out, describe(context.device, commit), seconds, _tell)
        run.all(chosen, before)
    print(f"written: {out / 'results.json'}, {out / 'results.csv'}")
    try:
        for path in draw(read(out), out):
            print(f"written: {path}")
    except ValueError as error:  # the figures are safe; only the plots are missing
        print(f"plots not drawn: {error}")


def _tell(row: Row) -> None:
    """One line on stdout."""
    from sparsekv.bench.table import shown

    figures = [shown(row)]
    figures += [f"{row.tflops:.0f} TFLOP/s"] if row.tflops is not None else []
    figures += [f"{row.tbs:.2f} TB/s"] if row.tbs is not None else []
    figures += [f"{row.roof:.0%} of the ceiling"] if row.roof is not None else []
    figures += [f"{key} {value:.4g}" for key, value in row.extra.items()]
    figures += [text for text in (row.reason, row.about) if text]
    figures += [f"target {row.target}: {row.met}"] if row.met else []
    print(f"{row.case} | {row.contender} | {' | '.join(figures)}", flush=True)


def table(
    results: Annotated[list[Path], typer.Argument(help="results.json files, or their folders.")],
    readme: Annotated[
        Path | None, typer.Option(help="Put the tables between the markers of this file.")
    ] = None,
) -> None:
    """Make Markdown tables of one or several result files."""
    from sparsekv.bench.results import read
    from sparsekv.bench.table import put, tables

    text = tables([read(path) for path in results])
    if readme is None:
        print(text)
    else:
        put(readme, text)
        print(f"written: {readme}")


def plot(
    results: Annotated[Path, typer.Argument(help="A results.json, or its folder.")],
    out: Annotated[Path, typer.Option(help="Folder for the PNG files.")] = Path("."),
) -> None:
    """Draw the plots of a result file."""
    from sparsekv.bench.plots import draw
    from sparsekv.bench.results import read

    found = read(results)
    make_folder("--out", out)
    for path in draw(found, out):
        print(f"written: {path}")
