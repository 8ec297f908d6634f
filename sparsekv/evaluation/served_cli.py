"""`sparsekv eval served`: a running server asked the questions of tasks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sparsekv.completions import Server
    from sparsekv.evaluation.example import Task
    from sparsekv.evaluation.results import Results
    from sparsekv.evaluation.served import Served
    from sparsekv.evaluation.wish import Wish

BaseUrl = Annotated[str, typer.Option(help="Of an OpenAI-compatible server: …/v1.")]
Policy = Annotated[
    str, typer.Option(help="What the server runs, for the table; full: dense, what others are to.")
]
Budget = Annotated[int | None, typer.Option(help="Its budget, for the table.")]
Model = Annotated[
    str | None,
    typer.Option(help="The served model, for its tokenizer; without it, SmolLM2-135M-Instruct."),
]
Tasks = Annotated[str, typer.Option(help="Comma-separated; scored by em or by generated text.")]
Data = Annotated[Path | None, typer.Option(help="The folder with prose, code, qa and mc.")]
Samples = Annotated[int, typer.Option(help="Contexts a task.")]
Concurrency = Annotated[int, typer.Option(help="Requests at a time.")]
ServedModel = Annotated[
    str | None, typer.Option(help="What the server calls the model; by default its first.")
]
ApiKey = Annotated[str | None, typer.Option(show_default=False)]
Out = Annotated[Path, typer.Option(help="Folder for the results and the table.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the results in --out.")]
Commit = Annotated[
    str | None, typer.Option(help="Recorded commit, where there is no git history to ask.")
]


def served(
    base_url: BaseUrl,
    policy: Policy = "full",
    budget: Budget = None,
    model: Model = None,
    tasks: Tasks = "needle-1k,needle-2k",
    data: Data = None,
    samples: Samples = 32,
    seed: Annotated[int, typer.Option(help="Of everything drawn.")] = 0,
    concurrency: Concurrency = 16,
    served_model: ServedModel = None,
    api_key: ApiKey = None,
    out: Out = Path("sparsekv-eval"),
    resume: Resume = False,
    commit: Commit = None,
) -> None:
    """Ask a running server; write results and their table. `eval table` puts servers beside each
    other."""
    from sparsekv import models
    from sparsekv.completions import Server
    from sparsekv.evaluation.cli import write_table
    from sparsekv.evaluation.results import Results
    from sparsekv.evaluation.served import FEED, PROTOCOL, Served
    from sparsekv.evaluation.wish import check_wish
    from sparsekv.policies import Full

    if concurrency < 1:
        raise ValueError(f"expected --concurrency >= 1, got {concurrency}")
    if (budget is None) != (policy == Full.name):
        raise ValueError(f"expected --budget with any --policy but full, got {policy} {budget}")
    wish = check_wish(
        Full.name, None, tasks, PROTOCOL, int, mode="full", samples=samples, seed=seed, data=data,
        gates=None, plan=None, feed=FEED,
    )  # fmt: skip
    server = Server(base_url, served_model, api_key)
    about = Served(policy, budget, model or models.PACKAGE, seed)
    made, config = _prepared(wish, model, about, base_url, commit)
    with Results(out, config, resume=resume) as results:
        asyncio.run(_fill(server, made, about, results, concurrency))
    write_table([out], out)


def _prepared(
    wish: Wish, model: str | None, about: Served, base_url: str, commit: str | None
) -> tuple[list[Task], dict[str, Any]]:
    """The tasks, and what `Results` is opened with. ValueError for what no server can be asked."""
    import torch
    from transformers import AutoTokenizer

    from sparsekv import models
    from sparsekv.bench.machine import describe
    from sparsekv.evaluation.served import check_task
    from sparsekv.evaluation.session import build_tasks, config_of

    made = build_tasks(wish, AutoTokenizer.from_pretrained(model or str(models.default_model())))
    for task in made:
        check_task(task)
    facts = describe(torch.device("cpu"), commit)
    facts |= {"device": f"the server at {base_url}", "batch_tokens": None}
    return made, config_of(wish, made, {"model": about.model, "dtype": "the server's"}, facts)


async def _fill(
    server: Server, made: list[Task], about: Served, results: Results, concurrency: int
) -> None:
    from sparsekv.evaluation.served import answered, asks
    from sparsekv.progress import counting

    done = {record.key for record in results.records}
    total = sum(len(asks(task)) for task in made)
    async with server:
        with counting("asking", made[0].name, total) as steps:
            steps.step(len(done))
            for task in made:
                steps.description = task.name
                async for record in answered(server, task, about, done, concurrency):
                    results.add([record])
                    steps.step(1)
