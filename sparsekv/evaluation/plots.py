"""The picture of an evaluation: accuracy against memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsekv.evaluation.frontier import Point, frontier
from sparsekv.plotting import pyplot
from sparsekv.policies import Full

_DPI = 130
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of the axis of bytes


def draw_frontier(found: list[Point], title: str, out: Path) -> Path:
    """Write the PNG `out`: a panel for each protocol, a line for each policy, the frontier dotted.

    Raises:
        ValueError: matplotlib is not installed, or nothing to draw.
    """
    plt = pyplot("the frontier plot")
    protocols = sorted({point.protocol for point in found})
    if not protocols:
        raise ValueError("expected averages to draw, got none")
    names = list(dict.fromkeys(p.policy for p in found if p.policy != Full.name))
    size = (6.0 * len(protocols) + 1.5, 5.0)
    figure, panels = plt.subplots(
        1, len(protocols), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    colours = plt.get_cmap("tab20")
    for axes, protocol in zip(panels[0], protocols, strict=True):
        own = [point for point in found if point.protocol == protocol]
        for i, name in enumerate(names):
            line = sorted((p for p in own if p.policy == name), key=lambda p: p.ratio)
            style = {"color": colours(i % 20), "linestyle": "--" if i >= 20 else "-"}
            if line:
                _curve(axes, line, name, style)
        best = frontier(own)
        axes.plot([p.ratio for p in best], [p.score for p in best], "k:", linewidth=1)
        for dense in (p for p in own if p.policy == Full.name):
            axes.axhline(dense.score, color="black", linewidth=1, label="dense cache")
        axes.set(title=protocol, xlabel="KV bytes, ratio to a dense cache", xscale="log")
        ticks = [tick for tick in _TICKS if tick >= min(p.ratio for p in own) / 1.2]
        axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    panels[0][0].set_ylabel("score, mean over tasks")
    drawn = panels[0][-1].get_legend_handles_labels()
    figure.legend(*drawn, fontsize=8, loc="outside right center")
    figure.suptitle(title)
    figure.savefig(out, dpi=_DPI)
    plt.close(figure)
    return out


def _curve(axes: Any, line: list[Point], name: str, style: dict[str, Any]) -> None:
    """Points of one policy with their intervals; a bootstrap interval need not hold its point."""
    below = [max(p.score - p.low, 0.0) for p in line]
    above = [max(p.high - p.score, 0.0) for p in line]
    axes.errorbar(
        [p.ratio for p in line], [p.score for p in line], yerr=[below, above], label=name,
        marker="o", markersize=4, linewidth=1, elinewidth=0.5, **style,
    )  # fmt: skip
