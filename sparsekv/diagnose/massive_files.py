"""What `sparsekv diagnose massive` writes: two CSV files, and two pictures as in the paper.

massive.csv              layer, position, token, feature, value, times the median
massive_layers.csv       layer, largest three magnitudes, median, massive activations
massive_layers.png       those magnitudes over depth (their per-layer figure)
massive_layer_<l>.png    magnitudes over token x feature behind one layer (their figure 1)
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsekv.diagnose.activations import Activations
from sparsekv.plotting import pyplot

_DPI = 110
_LINES, _POINTS = 96, 512  # a picture's tokens and features: more share one, the largest shows
_LABELS = 24  # tokens that are written out


def write_massive(seen: Activations, tokens: Sequence[str], out: Path) -> list[Path]:
    """Write all four files into the folder `out`; tokens: what each token reads as. Their paths.

    Raises:
        ValueError: matplotlib is not installed.
    """
    names = ("massive.csv", "massive_layers.csv", "massive_layers.png")
    files = [out / name for name in (*names, f"massive_layer_{seen.shown}.png")]
    _write_found(seen, tokens, files[0])
    _write_layers(seen, files[1])
    _draw_layers(seen, files[2])
    _draw_table(seen, tokens, files[3])
    return files


def _write_layers(seen: Activations, file: Path) -> None:
    counts = np.bincount([one.layer for one in seen.found], minlength=len(seen.median))
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(["layer", "top1", "top2", "top3", "median", "massive"])
        for layer, (top, median) in enumerate(zip(seen.top, seen.median, strict=True)):
            figures = [f"{x:.6g}" for x in (*top, median)]
            writer.writerow([layer, *figures, counts[layer]])


def _write_found(seen: Activations, tokens: Sequence[str], file: Path) -> None:
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(["layer", "position", "token", "feature", "value", "times_median"])
        for one in seen.found:
            times = abs(one.value) / max(float(seen.median[one.layer]), 1e-30)
            row = [one.layer, one.position, tokens[one.position], one.feature]
            writer.writerow([*row, f"{one.value:.6g}", f"{times:.0f}"])


def _draw_layers(seen: Activations, file: Path) -> None:
    plt = pyplot("the pictures")
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    layers = range(len(seen.median))
    for rank, (values, colour) in enumerate(zip(seen.top.T, ("C3", "C1", "C0"), strict=True)):
        axes.plot(layers, values, "o-", color=colour, ms=3, label=f"top {rank + 1}")
    axes.plot(layers, seen.median, "s-", color="0.4", ms=3, label="median")
    axes.set(yscale="log", xlabel="layer", ylabel="magnitude", title="hidden state behind a layer")
    axes.grid(alpha=0.3)
    axes.legend(ncols=2)
    figure.savefig(file, dpi=_DPI)
    plt.close(figure)


def _draw_table(seen: Activations, tokens: Sequence[str], file: Path) -> None:
    """Magnitudes in three dimensions, a line a token; and beside it the same as a map."""
    plt = pyplot("the pictures")
    count, width = seen.table.shape
    table = _largest(seen.table, _LINES, _POINTS)
    figure = plt.figure(figsize=(12, 4.6), layout="constrained")
    solid = figure.add_subplot(1, 2, 1, projection="3d")
    x = np.linspace(0, width - 1, table.shape[1])
    y = np.linspace(0, count - 1, table.shape[0])
    for place, row in zip(y, table, strict=True):
        solid.plot(x, np.full_like(x, place), row, color="royalblue", lw=1)
    solid.set(xlabel="feature", ylabel="token", zlabel="magnitude", title=f"layer {seen.shown}")
    flat = figure.add_subplot(1, 2, 2)
    shown = flat.imshow(
        np.log10(1 + table), aspect="auto", cmap="magma", interpolation="nearest",
        extent=(0, width, count, 0),
    )  # fmt: skip
    figure.colorbar(shown, ax=flat, label="log10(1 + magnitude)")
    flat.set(xlabel="feature", ylabel="token")
    if count <= _LABELS:
        flat.set_yticks(np.arange(count) + 0.5, tokens)
    figure.savefig(file, dpi=_DPI)
    plt.close(figure)


def _largest(table: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """At most rows x columns dots, each the largest of those that share it."""
    for axis, most in ((0, rows), (1, columns)):
        size = table.shape[axis]
        starts: Any = np.linspace(0, size, min(size, most) + 1).astype(int)[:-1]
        table = np.maximum.reduceat(table, starts, axis=axis)
    return table
