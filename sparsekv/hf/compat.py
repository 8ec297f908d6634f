"""The few places where transformers 5.17 to 5.24 differ, found by looking, not by version."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import PreTrainedModel


def cache_key(model: PreTrainedModel) -> str:
    """Name of the forward argument that carries the cache: "cache" or "past_key_values"."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def output_cache(output: Any) -> Any:
    """The cache in what a forward or `generate(return_dict_in_generate=True)` returned."""
    fields = getattr(output, "__dataclass_fields__", {})
    return output.cache if "cache" in fields else output.past_key_values


def tp_size(model: PreTrainedModel) -> int:
    """Ranks of the tensor-parallel group the model is sharded over; 1 if it is not."""
    return int(getattr(model, "_tp_size", None) or 1)
