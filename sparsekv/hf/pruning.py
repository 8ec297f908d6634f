"""Hidden states dropped between decoder layers, by forward hooks on the instance's layers.

`patch` puts the hooks on under a policy that prunes, `unpatch` takes them off. They do nothing but
for a prompt into a `SparseCache` of such a policy, so other caches run dense.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparsekv.hf.cache import SparseCache
from sparsekv.hf.check import layer_specs, self_test
from sparsekv.hf.layers import decoder_modules
from sparsekv.policies import Policy, PyramidInfer
from sparsekv.pruning import Pruning

_HOOKS = "_sparsekv_hooks"
_CACHES = ("cache", "past_key_values")
# Arguments of a decoder layer that have no token axis, or one over all columns.
_PLAIN = (*_CACHES, "attention_mask", "use_cache", "output_attentions", "output_router_logits")
_TEST = PyramidInfer(recent=0.25, decay=0.2, sinks=1, min_context=0)  # 8 tokens: 8, 8, 7 or fewer


def install_hooks(model: PreTrainedModel, policy: Policy | None) -> None:
    """Take off the hooks of an earlier patch; put them on if the policy prunes."""
    for handle in model.__dict__.pop(_HOOKS, ()):
        handle.remove()
    if policy is None or not policy.prunes:
        return
    layers = decoder_layers(model)
    handles = [x.register_forward_pre_hook(_drop, with_kwargs=True) for x in layers[1:]]
    handles.append(layers[-1].register_forward_hook(_restore, with_kwargs=True))
    model.__dict__[_HOOKS] = handles


def prove_pruning(model: PreTrainedModel, page_size: int) -> None:
    """Prune a prompt of a few tokens; raises ValueError if the model's layers do not allow it."""
    cache = SparseCache(_TEST, 1, layer_specs(model), page_size=page_size)
    self_test(model, cache)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers in order.

    Raises:
        ValueError: layers that cannot be found, or sliding ones.
    """
    layers = decoder_modules(model, "to prune hidden states between them")
    if any(spec.window is not None for spec in layer_specs(model)):
        raise ValueError(
            f"expected full-attention layers only to prune hidden states, got sliding ones in "
            f"{type(model).__name__}: their window counts tokens that are gone"
        )
    return layers


def _pruning(kwargs: dict[str, Any]) -> Pruning | None:
    """What was decided for the prompt that the layer is about to see, or None."""
    caches = [kwargs[name] for name in _CACHES if isinstance(kwargs.get(name), SparseCache)]
    return caches[0].state.pruning if caches else None


def _drop(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Before a layer: only the tokens that the layer before has chosen, and what belongs to them.

    Raises:
        ValueError: an argument that may have a token axis, and is not known.
    """
    hidden = args[0] if args else kwargs["hidden_states"]
    if hidden.shape[1] == 1:
        return None
    pruning = _pruning(kwargs)
    if pruning is None or pruning.places is None or pruning.chosen is None:
        return None
    layer: Any = module
    if hidden.shape[1] > pruning.counts[layer.self_attn.layer_idx]:
        hidden = _at(hidden, pruning.chosen)
    own: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name in ("position_embeddings", "position_ids") and value is not None:
            pair = isinstance(value, tuple)
            own[name] = (
                tuple(_at(x, pruning.places) for x in value) if pair else _at(value, pruning.places)
            )
        elif name not in (*_PLAIN, "hidden_states") and isinstance(value, Tensor | dict | tuple):
            raise ValueError(
                f"expected decoder layers that take positions alone beside hidden states, got "
                f"{name} in {type(module).__name__}"
            )
    if args:
        return (hidden, *args[1:]), kwargs | own
    return args, kwargs | own | {"hidden_states": hidden}


def _restore(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """After the last layer: every token has its row again, NaN where it was dropped on the way."""
    hidden = output[0] if isinstance(output, tuple) else output
    if hidden.shape[1] == 1:
        return None
    pruning = _pruning(kwargs)
    if pruning is None or pruning.places is None:
        return None
    full = hidden.new_full((len(hidden), pruning.tokens, hidden.shape[-1]), torch.nan)
    where = pruning.places.to(hidden.device)[..., None].expand_as(hidden)
    full = full.scatter(1, where, hidden)
    return (full, *output[1:]) if isinstance(output, tuple) else full


def _at(x: Tensor, index: Tensor) -> Tensor:
    """x [B or 1, T, ...] at index int64 [B, n]: [B, n, ...]."""
    index = index.to(x.device)
    x = x.expand(len(index), *x.shape[1:])
    for size in x.shape[2:]:
        index = index[..., None].expand(*index.shape, size)
    return x.gather(1, index)
