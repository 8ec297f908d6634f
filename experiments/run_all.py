"""Every experiment, spread over processes; each result is written as soon as it is there.

    python experiments/run_all.py --device cuda --data DIR --out DIR --seconds 600 --jobs 8

A forward of a small model keeps one CPU core busy and a GPU hardly, so processes share the GPU. The
same command again goes on where the last one stopped; tables and plots show what is done.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from queue import Empty
from typing import Any

import accuracy_vs_budget
import decode_time
import group_reduction
import headwise_budgets
import observation_window
import planned
import pooling
import position_modes
import pyramid_vs_uniform
import quantised_cache
import score_fidelity
import sinks_and_recency
import torch
import voting_rows
from experiment import Runnable, summarise, write_run
from units import Options, Session, Unit, begin, do, gates_file, groups, options_of, parser

from sparsekv.models import resolve_device
from sparsekv.policies import Duo
from sparsekv.progress import counting

# In this order: what runs out of time is at the end.
EXPERIMENTS: tuple[Runnable, ...] = (
    pyramid_vs_uniform.EXPERIMENT,
    planned.EXPERIMENT,
    score_fidelity.EXPERIMENT,
    voting_rows.EXPERIMENT,
    decode_time.EXPERIMENT,
    position_modes.EXPERIMENT,
    quantised_cache.EXPERIMENT,
    headwise_budgets.EXPERIMENT,
    accuracy_vs_budget.EXPERIMENT,
    sinks_and_recency.EXPERIMENT,
    group_reduction.EXPERIMENT,
    pooling.EXPERIMENT,
    observation_window.EXPERIMENT,
)


def chosen_units(options: Options, names: Sequence[str]) -> list[Unit]:
    """The work of the named experiments."""
    chosen = [experiment for experiment in EXPERIMENTS if experiment.name in names]
    return [unit for experiment in chosen for unit in experiment.units(options)]


def work(options: Options, names: Sequence[str], queue: Any, deadline: float, threads: int) -> None:
    """One process: load the model, then do groups until none is left, time is up, or the process
    that started it is gone."""
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    known = {unit.key: unit for unit in chosen_units(options, names)}
    session = Session(options)
    while time.time() < deadline and (parent is None or parent.is_alive()):
        try:
            keys = queue.get(timeout=1)
        except Empty:
            return
        try:
            do(session, [known[key] for key in keys])
        except Exception as error:  # one group must not take the others with it; it is told
            message = f"error: {keys[0]}: {type(error).__name__}: {error}"
            print(message, file=sys.stderr, flush=True)


def run_shared(options: Options, names: Sequence[str], jobs: int, deadline: float) -> int:
    """Do what is not done yet; returns how many units are left."""
    todo = groups(chosen_units(options, names), options)
    units = [unit for group in todo for unit in group]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    for group in todo:
        queue.put([unit.key for unit in group])
    threads = max(1, torch.get_num_threads() // jobs)
    arguments = (options, names, queue, deadline, threads)
    processes = [context.Process(target=work, args=arguments) for _ in range(min(jobs, len(todo)))]
    for process in processes:
        process.start()
    done = 0
    with counting("loading models", f"{len(units)} units", len(units)) as bar:
        while any(process.is_alive() for process in processes):
            time.sleep(0.5)
            now = sum(unit.file(options).exists() for unit in units)
            for _ in range(now - done):
                bar.step()
            done = now
    queue.cancel_join_thread()
    return sum(not unit.file(options).exists() for unit in units)


def main() -> int:
    """0 when every unit is done."""
    arguments = parser(__doc__)
    every = [experiment.name for experiment in EXPERIMENTS]
    arguments.add_argument("--seconds", type=float, default=float("inf"), help="begin no unit then")
    arguments.add_argument("--jobs", type=int, default=1, help="processes")
    arguments.add_argument("--only", nargs="+", choices=every, default=every, metavar="NAME")
    given = arguments.parse_args()
    started = time.time()
    options = replace(options_of(given), device=resolve_device(given.device))
    begin(options)
    if accuracy_vs_budget.EXPERIMENT.name in given.only and not gates_file(options).exists():
        Session(options).ready(Duo())  # before processes would measure its gates at once
    left = run_shared(options, given.only, given.jobs, started + given.seconds)
    for experiment in EXPERIMENTS:
        if experiment.name in given.only:
            summarise(experiment, options)
    write_run(options, time.time() - started)
    print(f"{options.out}: {left} units are left" if left else f"{options.out}: all done")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
