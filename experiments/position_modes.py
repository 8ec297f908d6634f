"""A window over a text longer than the model was trained for: original or cache positions?

    python experiments/position_modes.py --data DIR --out OUT

The text is fed in chunks; after each, only sinks and the newest tokens stay. With original
positions the distance from a token to the sinks grows without end; with cache positions (the
paper's) it never exceeds the budget and a chunk. The loss is given by the position of the token.
SmolLM2 was trained on 8192 positions. On a CPU the text is short, and only shows that the script
runs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from experiment import Experiment, main
from outcome import ALL, DENSE, Row, span
from units import Arm, Options, Session, Unit, key_of

import sparsekv
from sparsekv.evaluation.texts import PROSE, passages
from sparsekv.hf.compat import cache_key
from sparsekv.plotting import pyplot
from sparsekv.policies import Streaming

BUDGETS = (256, 1024)
CHUNK = 256
LENGTH = {True: 16384, False: 1024}  # on a GPU, on a CPU
RANGES = 8  # the text is cut into so many
ROWS = 8  # texts at once; a dense cache of 16384 tokens is 377 MB a row in bf16
TEXTS = 16  # at most


@torch.no_grad()
def chunks(arm: Arm, length: int, session: Session) -> list[Row]:
    """A row for each text and range of positions: the mean loss there."""
    rng = random.Random(f"positions {session.options.seed}")
    request = session.request()
    request = replace(request, contexts=min(request.contexts, TEXTS))
    texts = torch.tensor(passages(request, PROSE, length + 1, rng))
    found: list[Row] = []
    for batch in texts.split(ROWS):
        ids = batch.to(session.model.device)
        sparsekv.patch(session.model, arm.policy, arm.budget)
        cache = sparsekv.new_cache(session.model)
        losses = [_loss(session, cache, ids[:, s : s + CHUNK + 1]) for s in range(0, length, CHUNK)]
        report = cache.report()
        facts = {"headline": "nll", "kept": report.kept.mean}
        facts["kv_bytes"] = report.kv_bytes / len(ids)
        facts["dense_kv_bytes"] = report.dense_bytes / len(ids)
        by_range = torch.cat(losses, 1).unflatten(1, (RANGES, -1)).mean(-1).tolist()
        for row in by_range:
            example = str(len(found) // RANGES)
            found += [{"example": example, "range": i, "nll": v} | facts for i, v in enumerate(row)]
    return found


def _loss(session: Session, cache: object, ids: torch.Tensor) -> torch.Tensor:
    """Losses [B, CHUNK] of the tokens that follow each of a chunk's."""
    extra = {cache_key(session.model): cache, "use_cache": True}
    logits = session.model(input_ids=ids[:, :-1], **extra).logits.float()
    flat = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    return flat.view(len(ids), -1)


class PositionModes(Experiment):
    """The arms over ranges of positions, which take the place of tasks."""

    def unit(self, options: Options, arm: Arm, task: str, protocol: str) -> Unit:
        """One unit an arm, whatever the range."""
        length = LENGTH[options.on_gpu]
        settings = key_of(options, arm.policy, arm.budget, length, CHUNK)
        key = f"positions.n{options.samples}.s{options.seed}.{arm.label}.{arm.budget}.{settings}"
        return Unit(key.replace(" ", "-"), partial(chunks, arm, length))

    def units(self, options: Options) -> list[Unit]:
        """Without the repetition by range."""
        return list({work.key: work for work in super().units(options)}.values())

    def records(self, options: Options, arm: Arm, task: str, protocol: str) -> list[Row] | None:
        """Those of a range."""
        found = super().records(options, arm, task, protocol)
        return found and [row for row in found if row["range"] == int(task)]

    def rows(self, options: Options) -> list[Row]:
        """Without means over ranges: they are what is to be compared."""
        return [row for row in super().rows(options) if row["task"] != ALL]

    def outcome(self, rows: Sequence[Row]) -> list[str]:
        """The loss at the start and at the end."""
        lines = []
        for part in (self.tasks[0], self.tasks[-1]):
            cells = [row for row in rows if str(row["task"]) == part]
            losses = [
                f"{row['arm']}{'' if row['arm'] == DENSE else ' ' + str(row['budget'])} "
                f"{row['score']:.2f}{span(row)}"
                for row in cells
            ]
            lines.append(f"nll in part {int(part) + 1} of {RANGES}: {', '.join(losses)}.")
        return lines

    def plot(self, rows: Sequence[Row], out: Path) -> None:
        """Loss by range."""
        plt = pyplot("the plots")
        figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
        lines = dict.fromkeys((row["arm"], row["budget"]) for row in rows)
        for arm, budget in lines:
            line = [row for row in rows if (row["arm"], row["budget"]) == (arm, budget)]
            ends = [(row["score"], row["low"], row["high"]) for row in line]
            scores = np.array(ends, dtype=float)  # None is NaN
            label = arm if arm == DENSE else f"{arm}, budget {budget}"
            errors = np.abs(scores[:, 1:].T - scores[:, 0])
            axes.errorbar(range(len(line)), scores[:, 0], errors, label=label, marker="o", ms=4)
        axes.set(xlabel=f"part of the text, in {RANGES} equal parts", ylabel="nll", yscale="log")
        axes.set_title(self.question, fontsize=10)
        axes.legend(fontsize=8)
        figure.savefig(out, dpi=80)
        plt.close(figure)


POLICIES = {
    "original positions": Streaming(),
    "cache positions": Streaming(positions="cache"),
    "original, no sinks": Streaming(sinks=0),
}

EXPERIMENT = PositionModes(
    name="position_modes",
    question="Original or cache positions past the trained length?",
    arms=tuple(Arm(label, policy, b) for label, policy in POLICIES.items() for b in BUDGETS),
    tasks=tuple(str(i) for i in range(RANGES)),
    protocols=("in chunks",),
    against={
        "cache positions": "original positions",
        "original, no sinks": "original positions",
    },
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
