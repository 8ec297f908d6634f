"""Extra passes after a prompt: the model repeats what it cached, then the cache is compressed.

`generate` calls a patched model's `_prefill`; a manual loop calls `sparsekv.compress`. The passes
run the model's own layers over a `ProbeCache`, which stores nothing and counts nothing.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from sparsekv.device import device_of
from sparsekv.headwise import Scores
from sparsekv.hf.attention import KEY_MARK, OWN_CACHE
from sparsekv.hf.cache import PassingLayer, SparseCache
from sparsekv.hf.compat import cache_key
from sparsekv.policies import KVzip, resolve_budget
from sparsekv.probing import Probe, drop_keys, keep_best
from sparsekv.state import SparseState


class ProbeLayer(PassingLayer):
    """One layer of a `ProbeCache`."""

    def __init__(self, probe: Probe, layer: int) -> None:
        super().__init__()
        self.probe, self.layer = probe, layer

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Mark the key so that the attention function finds this layer, and return both."""
        setattr(key_states, KEY_MARK, self)
        return key_states, value_states

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scores: Scores,
        window: int | None,
    ) -> Tensor:
        """See `sparsekv.probing.Probe.attend`."""
        with device_of(q):
            return self.probe.attend(self.layer, q, k, v, scores)

    def get_seq_length(self) -> int:
        """Tokens of the row."""
        return self.probe.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns, the mark of our caches)."""
        return self.get_seq_length() + query_length, OWN_CACHE


class ProbeCache(Cache):
    """What a pass takes for its cache: the context of one row, never written to."""

    def __init__(self, probe: Probe) -> None:
        layers = range(len(probe.state.layers))
        super().__init__(layers=[ProbeLayer(probe, i) for i in layers])


@torch.no_grad()
def compress(
    model: PreTrainedModel,
    cache: SparseCache,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    found: MutableMapping[tuple[int, ...], Tensor] | None = None,
) -> SparseCache:
    """Run the extra passes of the cache's policy (kvzip) and keep the best tokens. Returns `cache`.

    For manual loops: feed the context to an empty cache, call this, go on with questions. In a
    padded batch positions must count real tokens, as in `generate`, which does all this by itself.

    Args:
        input_ids: int64 [B, T], all that the cache has seen. attention_mask: 0/1 [B, T], its left
            padding, or None.
        found: scores of earlier calls with the same model and policy, by context; whatever the
            budget, they need no passes again. Scores that were not there are added.

    Raises:
        ValueError: a policy without extra passes, ids that are not what was cached, or a cache that
            has dropped tokens already.
    """
    state = cache.state
    if not isinstance(state.policy, KVzip):
        raise ValueError(f"expected a cache under policy 'kvzip', got {state.policy.name!r}")
    rows = _rows(input_ids, attention_mask)
    _check_whole(state, rows)
    found = {} if found is None else found
    kept: dict[tuple[int, ...], dict[int, Tensor] | None] = {}
    for row, context in enumerate(rows):
        if context in kept:  # beams and the like start as copies of one prompt
            continue
        budget = resolve_budget(state.budget, len(context)) if context else 1
        kept[context] = None
        if len(context) > budget and state.ordinal:
            if context not in found:
                found[context] = _scores(model, state, row, context)
            kept[context] = _kept(state, found[context], budget)
    if any(stays is not None for stays in kept.values()):
        drop_keys(state, [kept[context] for context in rows])
    state.passed, state.held_steps = True, 0
    return cache


def _scores(model: PreTrainedModel, state: SparseState, row: int, context: Sequence[int]) -> Tensor:
    """fp32 [L, HK, T] of the governed layers: the scores of a row's tokens, by its passes."""
    policy = state.policy
    assert isinstance(policy, KVzip)
    shape = (state.stores[0].lens.shape[2], len(context))
    found = {i: torch.zeros(shape, device=state.store(i)[0].pool.device) for i in state.ordinal}
    base: Any = model.base_model
    sinks = min(policy.sinks, len(context))
    for repeat in policy.repeats(context):
        probe = Probe(state, row, repeat.start, repeat.stop, sinks, found)
        ids = torch.tensor([repeat.ids], device=model.device)
        positions = torch.arange(ids.shape[1], device=model.device)[None] + len(context)
        base(
            input_ids=ids, position_ids=positions, use_cache=True,
            **{cache_key(base): ProbeCache(probe)},
        )  # fmt: skip
    device = next(iter(found.values())).device
    return torch.stack([x.to(device) for x in found.values()])


def _kept(state: SparseState, scores: Tensor, budget: int) -> dict[int, Tensor]:
    """By layer, which tokens of a row stay: bool [HK, T]."""
    policy = state.policy
    assert isinstance(policy, KVzip)
    with device_of(scores):
        keep = keep_best(scores, budget, policy.sinks, policy.uniform)
    return dict(zip(state.ordinal, keep, strict=True))


def _rows(input_ids: Tensor, attention_mask: Tensor | None) -> list[tuple[int, ...]]:
    """The real tokens of each row."""
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"expected attention_mask {list(input_ids.shape)} like input_ids, got "
            f"{list(attention_mask.shape)}"
        )
    ids = input_ids.tolist()
    if attention_mask is None:
        return [tuple(row) for row in ids]
    real = attention_mask.bool().tolist()
    return [
        tuple(i for i, is_real in zip(row, mask, strict=True) if is_real)
        for row, mask in zip(ids, real, strict=True)
    ]


def _check_whole(state: SparseState, rows: list[tuple[int, ...]]) -> None:
    """Raise ValueError unless the cache holds just `rows`, whole."""
    lengths = [len(row) for row in rows]
    if lengths != state.tokens.tolist() or state.recording:
        raise ValueError(
            f"expected the ids of all tokens that the cache has seen, {state.tokens.tolist()} a "
            f"row, got {lengths}"
        )
    if state.passed:
        raise ValueError("expected a cache that holds its whole context, got a compressed one")


def prefill(
    self: PreTrainedModel, input_ids: Tensor, generation_config: Any, model_kwargs: dict,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Stand in for `_prefill`: compress a context that `generate` has just put in an empty cache.

    Raises:
        ValueError: a prompt of embeddings, which nobody can be asked to repeat.
    """
    cache, mask = model_kwargs.get(cache_key(self)), model_kwargs.get("attention_mask")
    original: Any = type(self)
    due = (
        isinstance(cache, SparseCache)
        and isinstance(cache.state.policy, KVzip)
        and not cache.get_seq_length()
    )
    if due and model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("expected input_ids for policy 'kvzip', got inputs_embeds")
    arguments = (input_ids, generation_config, model_kwargs, *args)
    output = original._prefill(self, *arguments, **kwargs)
    if due and isinstance(cache, SparseCache):
        compress(self, cache, input_ids, mask)
    return output
