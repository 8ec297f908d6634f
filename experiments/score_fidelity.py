"""Are the column sums that the kernels return those of eager attention, and do the ranks agree?

    python experiments/score_fidelity.py --data DIR --out OUT

Truth: probabilities of eager attention in float32, summed in float64 over the last rows and
averaged over a group. Against it: what a policy is handed (`column_scores` from the prefill's
log-sum-exp, no T x T matrix), and eager attention in the same dtype, which is what other libraries
rank by. Agreement is the share of the truth's best keys that are found, over all layers and heads.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from experiment import main
from outcome import Row
from torch import Tensor
from units import Options, Session, Unit, key_of

import sparsekv
from sparsekv.evaluation.texts import PROSE, passages
from sparsekv.hf.compat import cache_key
from sparsekv.models import load
from sparsekv.plotting import pyplot
from sparsekv.policies import LayerPlan, ModelShape, Need, Phase, Policy, Stats

DTYPES = ("float32", "bfloat16")
ROWS = (8, 32, 256, None)  # voting rows; None: all
BEST = (32, 64, 128)
TOKENS = {True: 2048, False: 384}  # on a GPU, on a CPU
TEXTS = 4  # at most: every one of a model's heads is a sample


@dataclass(frozen=True)
class Recorder(Policy):
    """Keeps one token and writes down the column sums that it was shown, by layer."""

    rows: int | None
    seen: dict[int, Tensor] = field(default_factory=dict, compare=False, repr=False)

    name: ClassVar[str] = "recorder"
    keeps: ClassVar[str] = "one token"
    paper: ClassVar[str] = "none (instrument)"

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        return (LayerPlan(1, recent=1),) * shape.num_layers

    def needs(self, layer: int, phase: Phase) -> Need | None:
        return Need("sum", rows=self.rows) if phase == "prefill" else None

    def score(self, layer: int, stats: Stats) -> Tensor:
        assert stats.columns is not None
        self.seen[layer] = stats.columns.double().cpu()
        return stats.columns


@torch.no_grad()
def kernel_sums(model: Any, ids: Tensor, rows: int | None) -> Tensor:
    """float64 [L, HK, T], as a policy is handed them."""
    recorder = Recorder(rows)
    sparsekv.patch(model, recorder, 1)
    model(input_ids=ids, use_cache=True, **{cache_key(model): sparsekv.new_cache(model)})
    sparsekv.unpatch(model)
    return torch.stack([recorder.seen[layer][0] for layer in sorted(recorder.seen)])


@torch.no_grad()
def eager_sums(model: Any, ids: Tensor) -> dict[int | None, Tensor]:
    """The same for all of `ROWS` from T x T probabilities."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    maps = model(input_ids=ids, output_attentions=True).attentions
    model.set_attn_implementation(before)
    heads = model.config.num_key_value_heads
    found = {}
    for rows in ROWS:
        layers = [a[0, :, -(rows or a.shape[2]) :].double().sum(1) for a in maps]  # [HQ, T]
        found[rows] = torch.stack([x.unflatten(0, (heads, -1)).mean(1).cpu() for x in layers])
    return found


def measure(dtype: str, tokens: int, session: Session) -> list[Row]:
    """A row for each text, source, number of rows and number of best keys."""
    options = session.options
    rng = random.Random(f"fidelity {options.seed}")
    texts = passages(session.request(), PROSE, tokens, rng)[:TEXTS]
    exact, _ = load(options.model, options.device, "float32")
    model, _ = load(options.model, options.device, dtype)
    found: list[Row] = []
    for i, text in enumerate(texts):
        ids = torch.tensor([text], device=model.device)
        truth, eager = eager_sums(exact, ids), eager_sums(model, ids)
        for rows in ROWS:
            for source, sums in (("kernel", kernel_sums(model, ids, rows)), ("eager", eager[rows])):
                facts = {"example": i, "source": source, "dtype": dtype, "rows": rows or "all"}
                found += [facts | row for row in _agreement(sums, truth[rows])]
    return found


def _agreement(sums: Tensor, truth: Tensor) -> list[Row]:
    """For each number of best keys, the share that is found: mean and least over the heads."""
    error = float(((sums - truth).abs().sum(-1) / truth.sum(-1)).max())
    ranks = sums.argsort(-1).argsort(-1).double(), truth.argsort(-1).argsort(-1).double()
    spearman = float(torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(
        *(r.flatten(0, 1) for r in ranks), strict=True)]).mean())  # fmt: skip
    rows = []
    for best in BEST:
        top = torch.zeros_like(truth).scatter_(-1, truth.topk(best).indices, 1.0)
        shares = top.gather(-1, sums.topk(best).indices).mean(-1)  # [L, HK]
        row = {"best": best, "share": float(shares.mean()), "least": float(shares.min())}
        rows.append(row | {"spearman": spearman, "largest_error": error})
    return rows


@dataclass(frozen=True)
class ScoreFidelity:
    """One unit a dtype."""

    name: str = "score_fidelity"
    question: str = "Are the kernel's column sums those of eager attention?"

    def units(self, options: Options) -> list[Unit]:
        """Everything that has to be run."""
        tokens = TOKENS[options.on_gpu]
        keys = {d: f"fidelity.{d}.{key_of(options, tokens, options.seed)}" for d in DTYPES}
        return [Unit(key, partial(measure, dtype, tokens)) for dtype, key in keys.items()]

    def rows(self, options: Options) -> list[Row]:
        """Means over the texts, and the worst of them."""
        records = [row for work in self.units(options) for row in work.records(options) or []]
        keys = dict.fromkeys((r["dtype"], r["source"], r["rows"], r["best"]) for r in records)
        table = []
        for key in keys:
            cell = [r for r in records if (r["dtype"], r["source"], r["rows"], r["best"]) == key]
            row = dict(zip(("dtype", "source", "rows", "best"), key, strict=True))
            row |= {n: float(np.mean([r[n] for r in cell])) for n in ("share", "spearman")}
            row |= {"least": min(r["least"] for r in cell), "texts": len(cell)}
            table.append(row | {"largest_error": max(r["largest_error"] for r in cell)})
        return table

    def plot(self, rows: Sequence[Row], out: Path) -> None:
        """A panel a dtype: agreement by voting rows, at the middle number of best keys."""
        plt = pyplot("the plots")
        figure, grid = plt.subplots(
            1, len(DTYPES), figsize=(8, 3), sharey=True, layout="constrained"
        )
        for axes, dtype in zip(grid, DTYPES, strict=True):
            for source in ("kernel", "eager"):
                line = [r for r in rows if (r["dtype"], r["source"]) == (dtype, source)]
                line = [r for r in line if r["best"] == BEST[1]]
                x = range(len(line))
                axes.plot(x, [r["share"] for r in line], marker="o", label=f"{source}, mean")
                axes.plot(x, [r["least"] for r in line], ls=":", label=f"{source}, worst head")
                axes.set_xticks(x, [str(r["rows"]) for r in line])
            axes.set(xlabel="voting rows", title=dtype, ylabel=f"share of the best {BEST[1]} found")
        grid[0].legend(fontsize=7)
        figure.savefig(out, dpi=80)
        plt.close(figure)

    def outcome(self, rows: Sequence[Row]) -> list[str]:
        """A line a dtype."""
        lines = []
        for dtype in dict.fromkeys(row["dtype"] for row in rows):
            parts = []
            for source in ("kernel", "eager"):
                cell = [r for r in rows if (r["dtype"], r["source"]) == (dtype, source)]
                share, least = np.mean([r["share"] for r in cell]), min(r["least"] for r in cell)
                parts.append(f"{source} {share:.4f} on average, {least:.3f} in the worst head")
            lines.append(f"{dtype}: share of the best keys of float32 found: {'; '.join(parts)}.")
        return lines


EXPERIMENT = ScoreFidelity()

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
