"""What policies may need of a model besides its queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from sparsekv.rope import Rotary


class Projections:
    """W_O [D_model, HQ * D] of layers, held by reference.

    They belong to the model: a copy of a cache shares them, and a pickled cache comes without.
    """

    def __init__(self, weights: Mapping[int, Tensor] = MappingProxyType({})) -> None:
        self._weights = dict(weights)

    def __getitem__(self, layer: int) -> Tensor:
        if layer not in self._weights:
            raise ValueError(
                f"expected the output projection of layer {layer}, got a cache without: make it "
                "with sparsekv.new_cache"
            )
        return self._weights[layer]

    def __deepcopy__(self, memo: Any) -> Projections:
        return self

    def __reduce__(self) -> tuple[type[Projections], tuple]:
        return Projections, ()


@dataclass(frozen=True)
class ModelParts:
    """rotary: RoPE of the full-attention layers, or None; projections: W_O by layer, or none."""

    rotary: Rotary | None = None
    projections: Projections = field(default_factory=Projections)
