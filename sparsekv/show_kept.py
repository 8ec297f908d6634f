"""`sparsekv show-kept`: a picture of which tokens of a prompt stay, by layer or by KV head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sparsekv
from sparsekv.hf.compat import cache_key
from sparsekv.plotting import pyplot
from sparsekv.policies import Policy, get_policy
from sparsekv.progress import spinning

# Dots across: more tokens than this share them.
_COLUMNS = 1000
_DPI = 110


def kept_of(
    model: Any, tokenizer: Any, input_ids: Tensor, policy: Policy | str, budget: int | float
) -> np.ndarray:
    """bool [L, HK, T]: the tokens of the prompt [1, T] that each KV head holds after it.

    The model stays patched. A policy that wants a tokenizer and has none gets this one.
    """
    sparsekv.patch(model, get_policy(policy).with_tokenizer(tokenizer), budget)
    cache = sparsekv.new_cache(model)
    # Through generate, where some policies read the prompt again; its one token is never fed.
    model.generate(
        input_ids.to(model.device),
        attention_mask=torch.ones_like(input_ids, device=model.device),
        max_new_tokens=1,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        **{cache_key(model): cache},
    )
    layers = range(len(cache.layers))
    heads = [cache.state.store(layer)[0].lens.shape[2] for layer in layers]
    kept = np.zeros((len(layers), max(heads), input_ids.shape[1]), dtype=bool)
    for layer in layers:
        for head in range(heads[layer]):
            kept[layer, head, cache.kept_positions(layer, 0, head)] = True
    return kept


def draw(kept: np.ndarray, title: str, out: Path, *, by_head: bool = False) -> None:
    """Write a PNG of kept [L, HK, T]: a row a layer, or a KV head of a layer; x is the position.

    The darker, the larger the share of a layer's heads, and of the tokens that share a dot, kept.

    Raises:
        ValueError: matplotlib is not installed.
    """
    plt = pyplot("the picture")
    layers, heads, tokens = kept.shape
    rows = kept.reshape(layers * heads, tokens) if by_head else kept.mean(1)
    height = 1.6 + 0.11 * len(rows) if by_head else 1.6 + 0.09 * max(len(rows), 12)
    figure, axes = plt.subplots(figsize=(10, min(height, 40)), layout="constrained")
    extent = (0, tokens, layers - 0.5, -0.5)
    shown = axes.imshow(
        np.sqrt(_dots(rows)), cmap="Greys", vmin=0, vmax=1, aspect="auto",
        interpolation="nearest", extent=extent,
    )  # fmt: skip
    shares = np.array([0, 0.1, 0.25, 0.5, 1])
    bar = figure.colorbar(shown, ax=axes, pad=0.01, ticks=np.sqrt(shares), label="share kept")
    bar.ax.set_yticklabels([f"{share:g}" for share in shares])
    axes.set(title=title, xlabel="position in the prompt", ylabel="layer")
    figure.savefig(out, dpi=_DPI)
    plt.close(figure)


def _dots(rows: np.ndarray) -> np.ndarray:
    """Means of at most `_COLUMNS` runs of equal length, but for rounding: float [R, columns]."""
    tokens = rows.shape[1]
    starts = np.linspace(0, tokens, min(tokens, _COLUMNS) + 1).astype(int)
    return np.add.reduceat(rows.astype(float), starts[:-1], axis=1) / np.diff(starts)


def show_kept(
    model: Any,
    tokenizer: Any,
    input_ids: Tensor,
    policy: Policy,
    budget: int | float,
    out: Path,
    *,
    by_head: bool = False,
) -> str:
    """Draw what `policy` keeps of a prompt [1, T]; returns the picture's title."""
    with spinning(f"{policy.name}: {input_ids.shape[1]} prompt tokens"):
        kept = kept_of(model, tokenizer, input_ids, policy, budget)
    tokens = kept.shape[2]
    title = f"{policy.name}: {kept.sum(2).mean():.0f} of {tokens} tokens per KV head on average"
    draw(kept, title, out, by_head=by_head)
    return title
