"""Massive activations: a few hidden numbers that are thousands of times larger than the others.

    h_l [T, D_model]      the residual stream behind decoder layer l
    massive               |h| > 100  and  |h| >= 1000 x median |h_l|

Sun et al., arXiv 2402.17762. They sit in a few features of a few tokens (the first, often a
delimiter), appear in an early layer and stay almost to the last. They hardly depend on the text:
they are biases, and make their tokens attention sinks. So what they tell a sparsity policy is which
tokens must not go; attention itself is measured in `heads.py`.

One forward hook a layer; of each layer only its largest numbers and its median stay, of one layer
the whole table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparsekv.hf.check import check_positions, evaluating
from sparsekv.hf.layers import decoder_modules

_TOP = 3


@dataclass(frozen=True)
class Massive:
    """One massive activation: `value` at `position` in `feature` behind `layer`."""

    layer: int
    position: int
    feature: int
    value: float


@dataclass(frozen=True)
class Activations:
    """top float [L, 3], the largest magnitudes of each layer, and median float [L].

    found: every massive activation, by layer, position, feature. table: fp32 [T, D_model], the
    magnitudes behind layer `shown`.
    """

    top: np.ndarray
    median: np.ndarray
    found: tuple[Massive, ...]
    shown: int
    table: np.ndarray

    @property
    def positions(self) -> tuple[int, ...]:
        """Tokens with a massive activation somewhere, ascending."""
        return tuple(sorted({one.position for one in self.found}))


@torch.no_grad()
def massive(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    magnitude: float = 100.0,
    ratio: float = 1000.0,
    layer: int | None = None,
) -> Activations:
    """Run ids int64 [1, T] through the model and look at every layer's output.

    magnitude, ratio: the two thresholds of the definition. layer: the one whose table is returned;
    None: the one with the largest number.

    Raises:
        ValueError: ids of another shape or too many, a layer that does not exist, a negative
            threshold, a model whose decoder layers cannot be found, or hidden states that are NaN.
    """
    modules = decoder_modules(model, "to look at their outputs")
    if ids.ndim != 2 or ids.shape[0] != 1 or not ids.shape[1]:
        raise ValueError(f"expected ids of one text [1, T], got {list(ids.shape)}")
    check_positions(model, ids.shape[1])
    if layer is not None and not 0 <= layer < len(modules):
        raise ValueError(f"expected a layer in 0 .. {len(modules) - 1}, got {layer}")
    if not (magnitude >= 0 and ratio >= 0):  # NaN fails here too
        raise ValueError(f"expected thresholds >= 0, got {magnitude} and {ratio}")
    collected = _Collected(magnitude, ratio, layer)
    handles = [m.register_forward_hook(collected.hook(i)) for i, m in enumerate(modules)]
    try:
        with evaluating(model):
            base: Any = model.base_model
            base(input_ids=ids.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return collected.result()


class _Collected:
    """What the hooks saw so far."""

    def __init__(self, magnitude: float, ratio: float, layer: int | None) -> None:
        self.magnitude, self.ratio, self.layer = magnitude, ratio, layer
        self.top: list[list[float]] = []
        self.median: list[float] = []
        self.found: list[Massive] = []
        self.shown, self.table, self.highest = -1, torch.empty(0), -1.0

    def hook(self, layer: int) -> Any:
        """A forward hook that looks at the output of `layer`."""

        def look(module: Any, args: Any, output: Any) -> None:
            self.add(layer, (output[0] if isinstance(output, tuple) else output)[0])

        return look

    def add(self, layer: int, h: Tensor) -> None:
        """h [T, D_model] behind `layer`; layers come in their order."""
        size = h.abs()
        largest = size.flatten().topk(min(_TOP, size.numel())).values.tolist()
        self.top.append(largest + [largest[-1]] * (_TOP - len(largest)))
        self.median.append(float(size.median()))
        if math.isnan(self.median[-1]):  # nothing is larger than NaN: none would be found
            raise ValueError(f"expected numbers behind layer {layer}, got NaN: does it overflow?")
        where = (size > self.magnitude) & (size.float() >= self.ratio * self.median[-1])
        for position, feature in where.nonzero().tolist():
            self.found.append(Massive(layer, position, feature, float(h[position, feature])))
        if layer == self.layer or (self.layer is None and largest[0] > self.highest):
            self.shown, self.table, self.highest = layer, size.cpu(), largest[0]

    def result(self) -> Activations:
        """All layers."""
        table = self.table.float().numpy()
        top, median = np.array(self.top), np.array(self.median)
        return Activations(top, median, tuple(self.found), self.shown, table)
