"""A forward that torch.compile can trace whole: norms, RoPE and MLP fuse, attention is one op.

Tracing must not see a cache that counts and evicts. So the traced forward gets a `TracedCache`,
which hands K and V through and answers every question about lengths with a constant. Its mask has
one axis too many or none at all, by which the attention function knows to call the opaque op
`sparsekv::attend`. When the compiled code runs, the op finds the real cache in the context that
`CompiledForward` opened.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from transformers import Cache, PreTrainedModel

from sparsekv.headwise import Scores
from sparsekv.hf.attention import TRACED_CACHE
from sparsekv.hf.cache import PassingLayer, SparseCache, SparseLayer
from sparsekv.hf.compat import cache_key

_RUNNING: ContextVar[SparseCache] = ContextVar("the cache of the compiled forward that runs")
_OP = "sparsekv::attend"
_INPUTS = ("input_ids", "position_ids", "attention_mask", "logits_to_keep")


def register_op() -> None:
    """Define the op, once a process."""
    if hasattr(torch.ops.sparsekv, "attend"):
        return
    torch.library.custom_op(_OP, _attend, mutates_args=())
    torch.library.register_fake(_OP, _empty_output)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    layer: int,
    softmax_scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention and eviction of one layer. q [B, HQ, T, D], k and v [B, HK, T, D], mask [B, C]."""
    own = cast(SparseLayer, _RUNNING.get().layers[layer])
    return own.attend(q, k, v, mask, Scores(softmax_scale, softcap, sinks), window)


def _empty_output(q: Tensor, *args: Any) -> Tensor:
    batch, heads, tokens, head_dim = q.shape
    return q.new_empty(batch, tokens, heads, head_dim)


class TracedLayer(PassingLayer):
    """One layer of a `TracedCache`."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Both as they are."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """A constant: a model that needs the length is told it by position_ids."""
        return 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(a constant, the mark of this cache)."""
        return query_length, TRACED_CACHE


class TracedCache(Cache):
    """What the traced forward takes for its cache."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[TracedLayer() for _ in range(num_layers)])


class CompiledForward:
    """A model's forward, compiled once for prompts of any shape and once for steps of each batch.

    Calls still run the op's Python: a step is made to be captured in a CUDA graph.
    A copy of a patched model shares this object, not what was compiled.
    """

    def __init__(self, backend: str = "inductor") -> None:
        register_op()
        self._warm: set[tuple[int, torch.dtype, torch.device, int]] = set()
        self.refused = False
        fixed: dict[str, Any] = {"fullgraph": True, "backend": backend}
        # A product with one row is a reduction: inductor writes it itself, and tuning pays.
        tuned: dict[str, Any] = {"coordinate_descent_tuning": True}
        self._prompt = torch.compile(_own_forward(), dynamic=True, **fixed)
        self._row = torch.compile(
            _own_forward(), dynamic=False, options=tuned if backend == "inductor" else None, **fixed
        )
        self._rows = torch.compile(_own_forward(), dynamic=False, **fixed)

    def is_warm(self, model: PreTrainedModel, batch: int) -> bool:
        """Whether the step of this model and batch size has been compiled."""
        return (id(model), model.dtype, model.device, batch) in self._warm

    def step(self, model: PreTrainedModel, inputs: dict[str, Any], cache: SparseCache) -> Any:
        """One token a row through all layers of `cache`; the output carries `cache`.

        inputs: no padding mask; a step needs none.

        Raises:
            TorchDynamoException: while tracing or compiling; no layer has run then.
        """
        batch = len(inputs["input_ids"])
        output = self._run(self._row if batch == 1 else self._rows, model, inputs, cache)
        self._warm.add((id(model), model.dtype, model.device, batch))
        return output

    def prompt(self, model: PreTrainedModel, inputs: dict[str, Any]) -> Any:
        """The forward of several tokens a row, or None where it has to run as it is."""
        cache, ids = inputs.get(cache_key(model)), inputs.get("input_ids")
        if self.refused or not isinstance(cache, SparseCache) or ids is None or ids.shape[1] == 1:
            return None
        known = {*_INPUTS, cache_key(model), "use_cache", "return_dict"}
        if inputs.get("position_ids") is None or torch.is_grad_enabled():
            return None
        if any(value is not None for name, value in inputs.items() if name not in known):
            return None
        try:
            return self._run(self._prompt, model, inputs, cache)
        except TorchDynamoException as error:
            self.refused = True
            warn_uncompiled("prompts", error)
            return None

    def _run(self, compiled: Any, model: Any, inputs: dict[str, Any], cache: SparseCache) -> Any:
        key = cache_key(model)
        traced = {name: inputs[name] for name in _INPUTS if inputs.get(name) is not None}
        traced |= {key: TracedCache(len(cache.layers)), "use_cache": True}
        token = _RUNNING.set(cache)
        try:
            output = compiled(model, traced)
        finally:
            _RUNNING.reset(token)
        output[key] = cache
        return output


def bound_forward(model: PreTrainedModel, compiled: CompiledForward) -> types.MethodType:
    """A `forward` for the instance `model` that is the class's own, compiled where it can be."""

    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        output = None if args else compiled.prompt(self, kwargs)
        return type(self).forward(self, *args, **kwargs) if output is None else output

    return types.MethodType(forward, model)


def warn_uncompiled(what: str, error: Exception) -> None:
    """One line with the first line of the reason."""
    reason = str(error).strip().splitlines()[0]
    warnings.warn(f"sparsekv runs {what} without torch.compile: {reason}", stacklevel=4)


def _own_forward() -> Callable[..., Any]:
    """`_forward` with a code object of its own: torch limits how often one of them is compiled, and
    models and kinds of forward shall not use up each other's share.
    """
    return types.FunctionType(_forward.__code__.replace(), _forward.__globals__)


def _forward(model: PreTrainedModel, inputs: dict[str, Any]) -> Any:
    """What is traced. The model is an argument: a copy of a patched model runs its own weights."""
    return type(model).forward(model, **inputs, return_dict=True)
