"""`patch`, `unpatch`, `new_cache`: put a policy under a model's `generate`, and take it away again.

The model's code is not touched. Its config names the attention function, and functions on the
instance, in place of methods, hand `generate` a `SparseCache` and its decode step. What `unpatch`
needs is kept beside them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from transformers import PreTrainedModel
from transformers.generation import GenerationMode

from sparsekv.cache.pages import check_page_size
from sparsekv.hf.attention import NAME, register
from sparsekv.hf.cache import SparseCache
from sparsekv.hf.check import (
    check_config,
    check_rotation,
    layer_specs,
    rotary_frequencies,
    self_test,
)
from sparsekv.hf.compat import cache_key, tp_size
from sparsekv.hf.extra_passes import prefill
from sparsekv.hf.graph import GraphedDecode, can_graph
from sparsekv.hf.parts import UNDO, model_parts
from sparsekv.hf.pruning import decoder_layers, install_hooks, prove_pruning
from sparsekv.hf.traced import CompiledForward, bound_forward
from sparsekv.policies import Full, Policy, get_policy, resolve_budget
from sparsekv.rope import Rotary, SinkShift

Model = TypeVar("Model", bound=PreTrainedModel)
_RECORD = "_sparsekv_patch"
_HOOK = "_prepare_cache_for_generation"
_MAY_COMPILE = "_valid_auto_compile_criteria"
_OWN_CACHES = (None, "dynamic")
_SHIFT = "to shift cached keys"


@dataclass(frozen=True)
class Patch:
    """What a patched model carries: what to build caches from, and what it was before."""

    policy: Policy
    budget: int | float
    page_size: int
    attn_implementation: str
    sink_shift: SinkShift | None
    kv_dtype: str | None
    compiled: CompiledForward | None
    compiles_prompts: bool
    defer_eviction: bool

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A model that is loaded whole is patched in the process that loads it, too."""
        register()
        self.__dict__.update(state)


def patch(
    model: Model,
    policy: str | Policy = "pyramid",
    budget: int | float = 512,
    *,
    page_size: int = 16,
    kv_dtype: str | None = None,
    compile: bool | Literal["decode"] = False,
    defer_eviction: bool = False,
) -> Model:
    """Make `model.generate` use a sparse KV cache. Returns the same model.

    Patching again replaces the policy. Caches made before keep theirs.

    Args:
        policy: a name of `sparsekv.POLICIES` or a policy object.
        budget: tokens kept per layer and KV head on average (int), or the fraction of the real
            prompt tokens to keep (float in (0, 1]).
        page_size: slots a page, 16, 32 or 64.
        kv_dtype: None keeps K and V as they are; "fp8_e4m3" (CUDA 8.9 or newer), "fp8_e5m2", "int8"
            or "int4" quantises what is kept, with one scale per token and KV head. A prompt is
            attended as it is and quantised when it is kept; every later step reads what is kept.
        compile: let torch.compile make the decode step that is captured on a GPU ("decode"), and
            the forward of prompts too (True). The first generation with a batch size waits half a
            minute for a step; the first prompts wait longer. Later ones are faster.
        defer_eviction: with `generate(prefill_chunk_size=...)`, evict after the last chunk and not
            after each: the same tokens stay as without chunks, but the whole prompt is cached
            until then.

    Raises:
        ValueError: an unknown policy or kv_dtype, a bad budget, page_size or flag, a policy that
            lacks what it needs, or a model or device that cannot be served; the model is left as it
            was.
    """
    chosen = get_policy(policy)
    resolve_budget(budget, 1)
    check_page_size(page_size)
    check_config(model)
    _check_policy(model, chosen, defer_eviction)
    previous = model.__dict__.get(_RECORD)
    _check_compile(model, chosen, compile, previous)
    shift = _sink_shift(model, chosen)
    before = previous.attn_implementation if previous else _own_attention(model)
    register()
    model.set_attn_implementation(NAME)
    compiled = previous.compiled if previous else None  # its code serves every policy
    record = Patch(
        chosen, budget, page_size, before, shift, kv_dtype,
        (compiled or CompiledForward()) if compile else None, compile is True, defer_eviction,
    )  # fmt: skip
    _install(model, record)
    for name, method in _METHODS.items():
        # A bound method would be pickled by its name, and loaded as the method it stands in for.
        model.__dict__.setdefault(name, partial(method, model))
    try:
        _prove(model)
    except Exception:
        if previous is None:
            unpatch(model)
        else:
            _install(model, previous)
        raise
    return model


def _own_attention(model: PreTrainedModel) -> str:
    """The attention function of a model that is not patched."""
    name: str = model.config._attn_implementation
    if name == NAME:
        raise ValueError(
            "expected a model with a config of its own, got one that shares the config of a "
            "patched model: build it from copy.deepcopy(config)"
        )
    return name


def _check_policy(model: PreTrainedModel, policy: Policy, defer_eviction: bool) -> None:
    """Refuse a policy that lacks what it needs, of its own, of the model or of the arguments."""
    if not isinstance(defer_eviction, bool):
        raise ValueError(f"expected defer_eviction to be True or False, got {defer_eviction!r}")
    policy.ready()
    if policy.prefill_block is not None and defer_eviction:
        raise ValueError(
            f"expected defer_eviction=False with policy {policy.name!r}, which evicts while it "
            "reads a prompt, got True"
        )
    if policy.tensor_parallel == "refused" and tp_size(model) > 1:
        raise ValueError(
            f"expected a model on one device for policy {policy.name!r}, which has to know all "
            f"heads of a layer, got one sharded over {tp_size(model)} tensor-parallel ranks"
        )
    if policy.prunes:
        decoder_layers(model)
    model_parts(model, policy)


def _sink_shift(model: PreTrainedModel, policy: Policy) -> SinkShift | None:
    if not policy.rerotates_sinks:
        return None
    return SinkShift(getattr(policy, "sinks", 0), Rotary(rotary_frequencies(model, _SHIFT)))


def _check_compile(
    model: PreTrainedModel, policy: Policy, compile: object, previous: Patch | None
) -> None:
    if not isinstance(compile, bool) and compile != "decode":
        raise ValueError(f"expected compile to be True, False or 'decode', got {compile!r}")
    if compile is True and policy.prunes:
        raise ValueError(
            f"expected compile=False or 'decode' with policy {policy.name!r}, whose prompts lose "
            "tokens between layers, got True"
        )
    ours = previous is not None and previous.compiles_prompts
    if compile is True and "forward" in model.__dict__ and not ours:
        raise ValueError("expected a model without hooks on its forward for compile=True, got some")


def _install(model: PreTrainedModel, record: Patch) -> None:
    """Put `record` and its forward on the model, in place of those that are there."""
    before = model.__dict__.get(_RECORD)
    if before is not None and before.compiles_prompts:
        del model.__dict__["forward"]
    install_hooks(model, record.policy)
    if record.compiled is not None and record.compiles_prompts:
        model.__dict__["forward"] = bound_forward(model, record.compiled)
    model.__dict__[_RECORD] = record


def unpatch(model: Model) -> Model:
    """Take the patch off; a model that has none is left alone. Returns the same model."""
    record = model.__dict__.pop(_RECORD, None)
    install_hooks(model, None)
    for name in _METHODS:
        model.__dict__.pop(name, None)
    if record is not None:
        model.set_attn_implementation(record.attn_implementation)
        if record.compiles_prompts:
            del model.__dict__["forward"]
    return model


def new_cache(model: PreTrainedModel) -> SparseCache:
    """An empty cache under the model's policy, for `model(ids, past_key_values=cache)`.

    Raises:
        ValueError: the model is not patched.
    """
    return cache_under(model, patch_of(model))


def cache_under(model: PreTrainedModel, record: Patch) -> SparseCache:
    """An empty cache as `new_cache` makes it while `record` is on the model.

    Caches carry their policy: a patched model serves those of any record, unless its policy prunes.
    """
    return SparseCache(
        record.policy, record.budget, layer_specs(model),
        page_size=record.page_size, sink_shift=record.sink_shift, kv_dtype=record.kv_dtype,
        defer_eviction=record.defer_eviction, parts=model_parts(model, record.policy),
    )  # fmt: skip


def is_patched(model: PreTrainedModel) -> bool:
    """Whether `model` carries a policy."""
    return _RECORD in model.__dict__


def patch_of(model: PreTrainedModel) -> Patch:
    """What `patch` has put on the model.

    Raises:
        ValueError: the model is not patched.
    """
    record = model.__dict__.get(_RECORD)
    if record is None:
        raise ValueError("expected a model patched by sparsekv.patch, got one without a policy")
    return record


def _prove(model: PreTrainedModel) -> None:
    """Check that the switch took effect and that every layer can be served."""
    if model.config._attn_implementation != NAME:
        raise ValueError(
            f"expected a model whose attention function can be chosen, got {type(model).__name__}"
        )
    record = patch_of(model)
    layers, size, shift = layer_specs(model), record.page_size, record.sink_shift
    cache = SparseCache(Full(), 1, layers, page_size=size, kv_dtype=record.kv_dtype)
    self_test(model, cache)
    assert cache.state.shape is not None
    record.policy.fits(cache.state.shape)
    if record.policy.prunes:
        prove_pruning(model, size)
    for rotary, purpose in (
        (shift.rotary if shift else None, _SHIFT),
        (model_parts(model, record.policy).rotary, UNDO),
    ):
        if rotary is not None:  # to be seen in exact keys only
            exact = SparseCache(Full(), 1, layers, page_size=size)
            self_test(model, exact)
            check_rotation(exact, rotary, purpose)
    if not cache.state.ordinal:
        warnings.warn(
            f"every layer of {type(model).__name__} has a sliding window and keeps it; policy "
            f"{record.policy.name!r} has no layer to act on",
            stacklevel=3,
        )


def _prepare_cache(
    self: PreTrainedModel, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any
) -> Any:
    """Stand in for `_prepare_cache_for_generation`: put a `SparseCache` where none was given."""
    if self.config._attn_implementation != NAME:
        raise ValueError(
            f"expected the attention function that sparsekv.patch has set, got "
            f"{self.config._attn_implementation!r}: patch the model again, or unpatch it"
        )
    name = cache_key(self)
    wanted = generation_config.use_cache is not False
    if (
        model_kwargs.get(name) is None
        and wanted
        and generation_config.cache_implementation in _OWN_CACHES
    ):
        # transformers refuses a cache object beside a cache name.
        generation_config.cache_implementation = None
        model_kwargs[name] = new_cache(self)
        # The original returns early for given caches, before it would do this.
        if getattr(generation_config, "is_assistant", False):
            model_kwargs[name].activate_past_recording()
    cache = model_kwargs.get(name)
    if isinstance(cache, SparseCache):
        mode = args[0] if args else kwargs.get("generation_mode")
        _check_mode(cache.state.policy, generation_config, mode)
        _set_mode(cache, generation_config, model_kwargs, mode)
        cache.state.max_columns = args[2] if len(args) > 2 else kwargs.get("max_cache_length")
    return getattr(type(self), _HOOK)(self, generation_config, model_kwargs, *args, **kwargs)


def _check_mode(policy: Policy, generation_config: Any, mode: Any) -> None:
    """Raise ValueError for a way to generate that the policy refuses."""
    assistant = bool(getattr(generation_config, "is_assistant", False))
    wanted = {
        "assisted": assistant or mode == GenerationMode.ASSISTED_GENERATION,
        "beams": (generation_config.num_beams or 1) > 1,
    }
    for way, reason in policy.refuses.items():
        if wanted[way]:
            raise ValueError(
                f"expected a policy that allows {way} generation, got {policy.name!r}: {reason}"
            )


def _set_mode(cache: SparseCache, generation_config: Any, model_kwargs: dict, mode: Any) -> None:
    """Tell the cache where drafts begin and whether the prompt comes in chunks."""
    state = cache.state
    state.keep_queries = generation_config.prefill_chunk_size is not None
    state.draft_start = None
    # Newer versions drop an all-ones mask and note its length.
    mask = model_kwargs.get("attention_mask")
    length = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
    if length == 0:
        raise ValueError("expected a prompt of at least 1 token, got an empty one")
    state.chunked_until = (length or 0) if state.keep_queries else 0
    if mode == GenerationMode.ASSISTED_GENERATION:
        state.draft_start = length  # prompt and first drafts come in one forward
        if state.draft_start is None:
            raise ValueError("expected an attention_mask to tell the prompt from drafts, got none")
        if cache.get_seq_length():  # it feeds the whole text again, with any cache
            raise ValueError("expected an empty cache for assisted decoding, got one with tokens")
    elif not getattr(generation_config, "is_assistant", False):
        state.recording = False
    elif length and not cache.get_seq_length():
        # An assistant whose first drafts are all rejected takes back a token of its prompt, too.
        single = length == 1 or (mask is not None and not mask[:, -2].all())
        state.draft_start = length if single else length - 1
        state.chunked_until = min(state.chunked_until, state.draft_start)


def _may_compile(self: PreTrainedModel, model_kwargs: dict, generation_config: Any) -> bool:
    """Stand in for `_valid_auto_compile_criteria`: our caches decode by CUDA graph."""
    cache = model_kwargs.get(cache_key(self))
    if isinstance(cache, SparseCache):
        return can_graph(self, cache, generation_config)
    return getattr(type(self), _MAY_COMPILE)(self, model_kwargs, generation_config)


def _compiled_call(self: PreTrainedModel, compile_config: Any) -> GraphedDecode:
    """Stand in for `get_compiled_call`."""
    return GraphedDecode(self, compile_config, patch_of(self).compiled)


# What `patch` puts on the instance.
_METHODS: dict[str, Callable[..., Any]] = {
    _HOOK: _prepare_cache,
    _MAY_COMPILE: _may_compile,
    "get_compiled_call": _compiled_call,
    "_prefill": prefill,
}
