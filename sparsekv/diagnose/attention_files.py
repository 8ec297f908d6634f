"""What `sparsekv diagnose attention` writes: a CSV by head, one by layer, and two pictures.

attention_heads.csv     layer, head, sink share, locality, entropy, spread, mass of the largest
attention_layers.csv    the same, as means over the heads of a layer
attention_heads.png     maps of layers x heads
attention_layers.png    means over heads by depth, and the range of heads around them
"""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from torch import Tensor

from sparsekv.diagnose.heads import HeadTable
from sparsekv.plotting import pyplot

_DPI = 110


def write_attention(table: HeadTable, out: Path) -> list[Path]:
    """Write all four files into the folder `out`; their paths.

    Raises:
        ValueError: matplotlib is not installed.
    """
    endings = ("heads.csv", "layers.csv", "heads.png", "layers.png")
    files = [out / f"attention_{ending}" for ending in endings]
    columns = _columns(table)
    layers, heads = table.entropy.shape
    rows = [
        [
            layer,
            head,
            table.windows[layer] or "",
            *(_figure(x[layer, head]) for x in columns.values()),
        ]
        for layer in range(layers)
        for head in range(heads)
    ]
    _write(files[0], ["layer", "head", "window", *columns], rows)
    means = [
        [layer, table.windows[layer] or "", *(_figure(x[layer].mean()) for x in columns.values())]
        for layer in range(layers)
    ]
    _write(files[1], ["layer", "window", *columns], means)
    _draw_heads(table, files[2])
    _draw_layers(table, files[3])
    return files


def _columns(table: HeadTable) -> dict[str, Tensor]:
    """Name -> [L, HQ]."""
    plain = {
        "sink_share": table.sink_share,
        "locality": table.locality,
        "entropy": table.entropy,
        "spread": table.spread,
    }
    return plain | {f"mass_of_{k}": table.mass[..., i] for i, k in enumerate(table.top)}


def _figure(value: Tensor) -> str:
    return f"{float(value):.5f}"


def _write(file: Path, head: list[str], rows: list[list]) -> None:
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(head)
        writer.writerows(rows)


def _titles(table: HeadTable) -> dict[str, Tensor]:
    """What the pictures show, all in [0, 1]."""
    middle = len(table.top) // 2
    return {
        f"share of the first {table.sinks}": table.sink_share,
        f"share of the last {table.recent}": table.locality,
        "entropy / log n": table.spread,
        f"share of the {table.top[middle]} best keys": table.mass[..., middle],
    }


def _draw_heads(table: HeadTable, file: Path) -> None:
    plt = pyplot("the pictures")
    layers = table.entropy.shape[0]
    size = (12, min(2.2 + 0.11 * layers, 14))
    figure, grid = plt.subplots(1, 4, figsize=size, layout="constrained", sharey=True)
    for axes, (title, values) in zip(grid, _titles(table).items(), strict=True):
        shown = axes.imshow(
            values.numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest"
        )
        axes.set(title=title, xlabel="query head")
    grid[0].set_ylabel("layer")
    figure.colorbar(shown, ax=grid, pad=0.01)
    figure.savefig(file, dpi=_DPI)
    plt.close(figure)


def _draw_layers(table: HeadTable, file: Path) -> None:
    plt = pyplot("the pictures")
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained", sharey=True)
    layers = torch.arange(table.entropy.shape[0]).numpy()
    for title, values in list(_titles(table).items())[:3]:
        low, high = values.amin(1).numpy(), values.amax(1).numpy()
        (line,) = left.plot(layers, values.mean(1).numpy(), "o-", ms=3, label=title)
        left.fill_between(layers, low, high, color=line.get_color(), alpha=0.12, lw=0)
    for i, k in enumerate(table.top):
        shade = 0.25 + 0.65 * (i + 1) / len(table.top)
        shares = table.mass[..., i].mean(1).numpy()
        right.plot(layers, shares, "o-", ms=3, color=plt.cm.Blues(shade), label=f"{k} best keys")
    for axes, title in ((left, "mean and range of the heads"), (right, "share of all attention")):
        axes.set(title=title, xlabel="layer", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=_DPI)
    plt.close(figure)
