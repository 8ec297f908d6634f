"""Where a model keeps its decoder layers."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def decoder_modules(model: PreTrainedModel, purpose: str) -> list[nn.Module]:
    """The decoder layers in order. purpose: what for, "to ...", in the error.

    Raises:
        ValueError: layers that cannot be found.
    """
    name, layers = type(model).__name__, getattr(model.base_model, "layers", None)
    numbers = [getattr(getattr(x, "self_attn", None), "layer_idx", None) for x in layers or ()]
    if numbers != list(range(model.config.num_hidden_layers)) or not isinstance(
        layers, nn.ModuleList
    ):
        raise ValueError(
            f"expected decoder layers in base_model.layers with a self_attn each {purpose}, got "
            f"layers {numbers} in {name}"
        )
    return list(layers)
