"""`sparsekv bench serve`: its options. What is heavy is imported when it runs."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsekv.options import json_object

if TYPE_CHECKING:
    from sparsekv.bench.results import Row
    from sparsekv.bench.serve.options import Choice
    from sparsekv.bench.serve.record import Record
    from sparsekv.bench.serve.run import Run, Settings
    from sparsekv.bench.serve.workload import Workload

EXAMPLES = (
    "Examples:\n\n"
    "sparsekv bench serve --shape llama-8b --kv-gib 6 --concurrency 20,40 --seconds 500\n\n"
    "sparsekv bench serve --model ./Qwen3-8B --modes dense,snapkv --budget 2048 --resume\n\n"
    "sparsekv bench serve --base-url http://localhost:8000/v1 --label dense --rates 1,2"
)
_JSON = "<json>"
# What of the figures a line on the terminal has.
_SHOWN = (
    ("{:.2f}× dense", "times_dense"),
    ("TTFT p50 {:.0f} ms", "ttft_p50_ms"),
    ("p99 {:.0f}", "ttft_p99_ms"),
    ("token {:.2f} ms", "tpot_p50_ms"),
    ("step {:.2f} ms", "step_p50_ms"),
    ("running {:.1f}", "running_mean"),
    ("KV at most {:.2f} GiB", "kv_gib_max"),
    ("{:.0f} preempted", "preemptions"),
)

Model = Annotated[str | None, typer.Option(help="Hugging Face id or local folder.")]
ModelShape = Annotated[
    str | None,
    typer.Option(help="Instead of a model: dummy weights in the shape of llama-8b (or tiny)."),
]
Modes = Annotated[
    str,
    typer.Option(
        help="Comma-separated: dense (vLLM without plugins), full (the plugin, asked for nothing), "
        "or policies."
    ),
]
Budget = Annotated[int, typer.Option(help="Tokens kept per KV head in each sparse layer.")]
Sparse = Annotated[
    str,
    typer.Option(metavar=_JSON, help="More for the policies: '{\"full_layers\": 4}'."),
]
EngineArguments = Annotated[
    str,
    typer.Option(
        "--engine", metavar=_JSON, help="More arguments of vLLM's engine, for every mode."
    ),
]
KVGib = Annotated[
    str, typer.Option(help="KV memory of a GPU in GiB, or unlimited: what vLLM takes. A list.")
]
Lengths = Annotated[
    str,
    typer.Option(help="Tokens in / out: 4000/500,16000/500; 32000/500@8: just a closed loop of 8."),
]
Concurrency = Annotated[str, typer.Option(help="Clients of the closed loops.")]
Rounds = Annotated[int, typer.Option(help="Requests of each client.")]
Rates = Annotated[str, typer.Option(help="Requests a second of Poisson arrivals.")]
Requests = Annotated[int, typer.Option(help="Requests at each of --rates.")]
Ramp = Annotated[
    float, typer.Option(help="Seconds over which the clients of a closed loop begin; 0: together.")
]
Warmup = Annotated[int, typer.Option(help="Requests before each workload that do not count.")]
Seed = Annotated[int, typer.Option(help="Of prompts, arrivals and dummy weights.")]
Timeout = Annotated[float, typer.Option(help="Seconds that a workload may take.")]
Seconds = Annotated[
    float | None, typer.Option(help="Begin no workload later; modes share what is left equally.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Measure only what --out does not have.")]
Out = Annotated[Path, typer.Option(help="Folder for the files, the plots and vLLM's logs.")]
BaseUrl = Annotated[
    str | None, typer.Option(help="Measure this OpenAI-compatible server (…/v1), start none.")
]
Label = Annotated[str, typer.Option(help="What the server of --base-url is called in the table.")]
Vocab = Annotated[int, typer.Option(help="With --base-url: token ids are drawn below this.")]
ApiKey = Annotated[str | None, typer.Option(help="With --base-url.", show_default=False)]
VllmSite = Annotated[str | None, typer.Option(help="A folder of packages that has vLLM.")]
Commit = Annotated[
    str | None, typer.Option(help="Recorded commit, where there is no git history to ask.")
]


def serve(
    model: Model = None,
    shape: ModelShape = None,
    modes: Modes = "dense,layersplit",
    budget: Budget = 1024,
    sparse: Sparse = "{}",
    engine: EngineArguments = "{}",
    kv_gib: KVGib = "6",
    lengths: Lengths = "4000/500",
    concurrency: Concurrency = "1,5,10,20,40",
    rounds: Rounds = 3,
    ramp: Ramp = 0.0,
    rates: Rates = "",
    requests: Requests = 60,
    warmup: Warmup = 4,
    seed: Seed = 0,
    timeout: Timeout = 600.0,
    seconds: Seconds = None,
    resume: Resume = False,
    out: Out = Path("sparsekv-serve"),
    base_url: BaseUrl = None,
    label: Label = "server",
    vocab: Vocab = 10_000,
    api_key: ApiKey = None,
    vllm_site: VllmSite = None,
    commit: Commit = None,
) -> None:
    """Requests against vLLM, dense and sparse: throughput, latencies, KV memory held."""
    from sparsekv.bench.serve import options
    from sparsekv.bench.serve.run import Run, Settings

    todo = options.workloads(lengths, concurrency, rounds, ramp, rates, requests)
    more = json_object(engine, "--engine")
    settings = Settings(seed, warmup, timeout, seconds)
    run = Run(_record(out, shape or model, settings, more, commit, resume), settings, _tell)
    if base_url is not None:
        _measure_server(run, todo, label, base_url, shape or model, vocab, api_key)
    else:
        choice = options.Choice.read(modes, kv_gib, budget, sparse, more)
        _measure_modes(run, todo, choice, model, shape, vllm_site)
    _finish(out)


def _record(
    out: Path, model: str | None, settings: Settings, engine: dict[str, Any], commit: str | None,
    resume: bool,
) -> Record:  # fmt: skip
    import torch

    from sparsekv.bench.machine import describe, driver
    from sparsekv.bench.serve.record import SETTINGS, UNKNOWN, Record

    shared = {"model": model, "engine": engine, "seed": settings.seed, "warmup": settings.warmup}
    # Asked about a GPU, torch would hold memory on it; vLLM says what it is.
    machine = describe(torch.device("cpu"), commit) | {"device": UNKNOWN, SETTINGS: shared}
    machine |= {"driver": driver()} if torch.cuda.is_available() else {}
    return Record.resumed(out, machine) if resume else Record(out, machine)


def _measure_modes(
    run: Run, todo: list[Workload], choice: Choice, model: str | None, shape: str | None,
    site: str | None,
) -> None:  # fmt: skip
    """An engine a mode. Raises ValueError for what no engine could be started with."""
    import torch

    from sparsekv.bench.serve.plan import engine_arguments, modes
    from sparsekv.bench.serve.processes import Interpreter

    if (model is None) == (shape is None):
        given = "neither" if model is None else "both"
        raise ValueError(f"expected --model or --shape (or --base-url), got {given}")
    if site is None and find_spec("vllm") is None:
        raise ValueError(
            "expected vLLM (pip install 'sparsekv[vllm]'), --vllm-site or --base-url, got none"
        )
    on_gpu = torch.cuda.is_available()
    shared = engine_arguments(todo, shape, on_gpu, run.settings.seed) | choice.engine
    interpreter = Interpreter(site, on_gpu)
    with _folder_of(model, shape) as path:
        with interpreter.packages():  # policies ask vLLM how it builds the model
            found = modes(path, choice, shared)
        run.all(found, todo, interpreter, offline=shape is not None)


def _measure_server(
    run: Run, todo: list[Workload], label: str, base_url: str, model: str | None, vocab: int,
    api_key: str | None,
) -> None:  # fmt: skip
    from sparsekv.bench.serve.http_engine import HttpEngine
    from sparsekv.bench.serve.plan import server

    run.over_http(server(label), todo, HttpEngine(base_url, model, vocab, api_key))


@contextlib.contextmanager
def _folder_of(model: str | None, shape: str | None) -> Iterator[str]:
    """The model as vLLM is told it; that of a shape is a folder with a config, for the while."""
    from sparsekv.bench.serve.plan import write_shape

    if shape is None:
        yield str(model)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_shape(shape, Path(folder))
        yield folder


def _tell(row: Row) -> None:
    """One line on stdout."""
    figures = [f"{row.value:.0f} tok/s" if row.value is not None else row.status]
    for text, key in _SHOWN:
        if key in row.extra:
            figures.append(text.format(row.extra[key]))
    figures += [row.reason] if row.reason else []
    figures += [f"target {row.target}: {row.met}"] if row.met else []
    print(f"{row.case} | {row.contender} | {' | '.join(figures)}", flush=True)


def _finish(out: Path) -> None:
    from sparsekv.bench.plots import draw
    from sparsekv.bench.results import read
    from sparsekv.bench.serve.record import FLAT

    print(f"written: {out / 'results.json'}, {out / 'results.csv'}, {out / FLAT}")
    try:
        for path in draw(read(out), out):
            print(f"written: {path}")
    except ValueError as error:  # the figures are safe; only the plots are missing
        print(f"plots not drawn: {error}")
