"""Decode steps of `generate` as one CUDA graph: the host stops launching, the GPU starts working.

`generate` asks the model whether its decode forward can be compiled and, if so, for the compiled
call. A patched model answers with a `GraphedDecode`: the first step runs as always (it compiles the
kernels), the second is captured, all further ones are replays. Layers that a replay leaves over
their budget (`decode="interval"`) are compressed before the next one. With
`patch(..., compile="decode")` what is captured is the forward that torch.compile made. What cannot
be captured or compiled runs as always, after one warning that names the reason.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel

from sparsekv.hf.cache import SparseCache
from sparsekv.hf.compat import cache_key, tp_size
from sparsekv.hf.traced import CompiledForward, warn_uncompiled
from sparsekv.interval import compress_due
from sparsekv.pruning import cut_due
from sparsekv.steady import HostCount, addresses, advance, hold

# Decode steps whose pages are found in advance; when they are used up, the next are, and the
# graph is captured again.
_HELD_STEPS = 2048
_UNTOLD_STEPS = 256
_FORWARD = ("input_ids", "position_ids", "logits_to_keep")


def can_graph(model: PreTrainedModel, cache: SparseCache, generation_config: Any) -> bool:
    """Whether a generation is worth a graph at all; what this refuses runs as always."""
    return (
        model.device.type == "cuda"
        and not generation_config.disable_compile
        and generation_config.num_beams == 1
        and not generation_config.is_assistant
        and not cache.state.recording
        and tp_size(model) == 1
        and len(set(getattr(model, "hf_device_map", {"": 0}).values())) == 1
    )


class GraphedDecode:
    """Stands in for `model.__call__` in the decode loop of one `generate`.

    compile_config: for caches that are not ours, which get transformers' own compiled call.
    compiled: the model's compiled forward, or None to capture its forward as it is.
    """

    def __init__(
        self, model: PreTrainedModel, compile_config: Any, compiled: CompiledForward | None = None
    ) -> None:
        self.model, self.name = model, cache_key(model)
        self.compile_config, self.compiled = compile_config, compiled
        self.graph: torch.cuda.CUDAGraph | None = None
        self.memory: tuple[int, ...] = ()
        self.inputs: dict[str, Tensor] = {}
        self.output: Any = None
        self.refused = False

    def __call__(self, **inputs: Any) -> Any:
        """One decode step; the output's logits are overwritten by the next one."""
        cache = inputs.get(self.name)
        if not isinstance(cache, SparseCache):
            compiled = type(self.model).get_compiled_call(self.model, self.compile_config)
            return compiled(**inputs)
        if self.refused or not self._plain(inputs, cache):
            return self.model(**inputs)
        if not cache.state.held_steps:
            left = (cache.state.max_columns or 0) - cache.get_seq_length()
            # Given only the new tokens of a turn, generate counts its limit without the old ones.
            hold(cache.state, min(left, _HELD_STEPS) if left > 0 else _UNTOLD_STEPS)
            self.graph = None
            return self.model(**inputs)
        batch = len(inputs["input_ids"])
        if self.compiled is not None and not self.compiled.is_warm(self.model, batch):
            return self._compile(inputs, cache)
        if self.graph is None or addresses(cache.state) != self.memory:
            if not self._capture(inputs, cache):
                return self.model(**inputs)
            assert self.graph is not None
            self.graph.replay()
            _between(cache)
        else:
            for name, static in self.inputs.items():
                static.copy_(inputs[name])
            self.graph.replay()
            advance(cache.state)  # the host counts while the device works
            _between(cache)
        return self.output

    def _plain(self, inputs: dict[str, Any], cache: SparseCache) -> bool:
        """One token a row and no argument that this class does not know."""
        known = {*_FORWARD, self.name, "attention_mask", "use_cache", "return_dict"}
        unknown = [name for name, value in inputs.items() if name not in known and value]
        if unknown:
            return self._refuse(f"generate passes {', '.join(unknown)}")
        ids = inputs.get("input_ids")
        if ids is None or ids.shape[1] != 1 or cache.state.recording:
            return False
        if inputs.get("position_ids") is None:  # it would ask the cache for a length, once
            return self._refuse("the model is not told its positions")
        return True

    def _compile(self, inputs: dict[str, Any], cache: SparseCache) -> Any:
        """A step by the compiled forward, which is compiled for this batch size on the way."""
        assert self.compiled is not None
        try:
            return self.compiled.step(self.model, _forwarded(inputs), cache)
        except TorchDynamoException as error:  # while tracing or compiling: no layer has run yet
            self.compiled = None
            warn_uncompiled("decode steps", error)
            return self.model(**inputs)

    def _capture(self, inputs: dict[str, Any], cache: SparseCache) -> bool:
        forward = _forwarded(inputs)
        self.inputs = {name: x.clone() for name, x in forward.items() if isinstance(x, Tensor)}
        before = HostCount.of(cache.state)
        graph = torch.cuda.CUDAGraph()
        cache.state.capturing = True
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.output = self._step(forward | self.inputs, cache)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            before.put_back(cache.state)
            _leave_capture()
            return self._refuse(f"the step cannot be captured: {str(error).splitlines()[0]}")
        finally:
            cache.state.capturing = False
        self.graph, self.memory = graph, addresses(cache.state)
        return True

    def _step(self, forward: dict[str, Any], cache: SparseCache) -> Any:
        if self.compiled is not None:
            return self.compiled.step(self.model, forward, cache)
        return self.model(**forward, **{self.name: cache}, use_cache=True, return_dict=True)

    def _refuse(self, reason: str) -> bool:
        self.refused = True
        warnings.warn(f"sparsekv decodes without a CUDA graph: {reason}", stacklevel=4)
        return False


def _forwarded(inputs: dict[str, Any]) -> dict[str, Any]:
    """What a fixed step is given: no padding mask, for one token a row needs none."""
    return {name: inputs[name] for name in _FORWARD if inputs.get(name) is not None}


def _between(cache: SparseCache) -> None:
    """What steps make due that a captured one does not do."""
    compress_due(cache.state)
    cut_due(cache.state)


def _leave_capture() -> None:
    """After a failed capture the random generator still waits for its end; an empty one ends it."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")
