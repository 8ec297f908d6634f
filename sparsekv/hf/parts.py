"""What a policy's features need of a model: its RoPE and its output projections, or a refusal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparsekv.hf.check import layer_types, rotary_frequencies
from sparsekv.hf.compat import tp_size
from sparsekv.parts import ModelParts, Projections
from sparsekv.policies.base import Policy
from sparsekv.policies.features import ExpectedProbability, Feature, ProjectedValueNorm
from sparsekv.rope import Rotary

UNDO = "to undo the rotation of queries"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def model_parts(model: PreTrainedModel, policy: Policy) -> ModelParts:
    """The parts of `model` that `policy` asks about; what it does not ask about is not looked for.

    Raises:
        ValueError: RoPE that cannot be inverted, or a W_O that cannot be found or read.
    """
    layers = _full_layers(model)
    asked: set[type[Feature]] = {
        type(feature)
        for ordinal in range(len(layers))
        for phase in ("prefill", "decode")
        for feature in policy.features(ordinal, phase)  # type: ignore[arg-type]
    }
    rotary, projections = None, Projections()
    if ExpectedProbability in asked:
        rotary = Rotary(rotary_frequencies(model, UNDO))
    if ProjectedValueNorm in asked:
        purpose = f"for policy {policy.name!r}"
        projections = Projections(output_projections(model, purpose))
    return ModelParts(rotary, projections)


def _full_layers(model: PreTrainedModel) -> list[int]:
    return [i for i, kind in enumerate(layer_types(model.config)) if kind == "full_attention"]


def output_projections(model: PreTrainedModel, purpose: str) -> dict[int, Tensor]:
    """W_O [D_model, HQ * D] of each full-attention layer, this rank's heads only.

    purpose: what for, "to ..." or "for ...", in errors.

    Raises:
        ValueError: a W_O that cannot be found or read.
    """
    layers = _full_layers(model)
    modules: dict[int, nn.Module] = {}
    for module in model.modules():
        layer, projection = getattr(module, "layer_idx", None), getattr(module, "o_proj", None)
        if isinstance(layer, int) and isinstance(projection, nn.Module):
            modules[layer] = projection
    missing = [layer for layer in layers if layer not in modules]
    if missing:
        raise ValueError(
            f"expected self_attn.o_proj in every full-attention layer of {type(model).__name__} "
            f"{purpose}, got none in layers {missing}"
        )
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * dim // tp_size(model)
    return {layer: _weight(modules[layer], width, layer, purpose) for layer in layers}


def _weight(projection: nn.Module, width: int, layer: int, purpose: str) -> Tensor:
    """The weight of a plain linear layer with `width` inputs."""
    weight: Any = getattr(projection, "weight", None)
    where = f"in o_proj of layer {layer} {purpose}"
    if type(projection) is not nn.Linear:
        raise ValueError(f"expected nn.Linear {where}, got {type(projection).__name__}")
    if hasattr(weight, "to_local"):
        weight = weight.to_local()
    elif type(weight) not in (nn.Parameter, Tensor):
        raise ValueError(f"expected a plain weight {where}, got {type(weight).__name__}")
    if weight.dtype not in _FLOATS or weight.device.type == "meta":
        raise ValueError(
            f"expected a floating-point weight on a device {where}, got {weight.dtype} on "
            f"{weight.device} (quantised or offloaded)"
        )
    if weight.ndim != 2 or weight.shape[1] != width:
        raise ValueError(f"expected a weight [D_model, {width}] {where}, got {list(weight.shape)}")
    return weight.detach()
