"""`calibrate_duo`: which heads of a model miss what sinks and recent tokens do not show.

DuoAttention trains a gate a head on a synthetic recall task. This is not that: nothing is trained.
The text runs through the model once, with dense attention, and beside it each head attends its
sinks and recent tokens only. The gate of a KV head is how much of its output is then wrong,

    r = sum_hi |full_hi - streaming_hi|^2 / sum_hi |full_hi|^2        gate = r / (1 + r)

over its query heads h and the tokens i for which the two may differ. A head that looks back on the
texts it is calibrated on gets a high gate: give texts of the kind and length it will meet, with
long-range recall in them. One forward a text; beside it, one attention output.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparsekv.device import device_of
from sparsekv.headwise import Scores
from sparsekv.hf.cache import SparseCache, SparseLayer
from sparsekv.hf.check import layer_specs
from sparsekv.hf.compat import cache_key, tp_size
from sparsekv.hf.patch import is_patched, patch, unpatch
from sparsekv.kernels.prefill import prefill_attention
from sparsekv.policies import Duo, Full


def calibrate_duo(
    model: PreTrainedModel,
    texts: Iterable[str | Tensor],
    *,
    tokenizer: Any = None,
    sparsity: float = 0.5,
    sinks: int = 64,
    recent: int = 256,
) -> Duo:
    """`Duo` with gates measured on `texts`, for `sparsekv.patch(model, ...)` and `Duo.save`.

    Args:
        model: a causal language model; a patch on it stays, or does not appear.
        texts: strings (with `tokenizer`) or ids int64 [T] or [1, T], each of more than
            sinks + recent tokens.
        sparsity, sinks, recent: see `Duo`; gates hold for the window they were measured with.

    Raises:
        ValueError: no text, a text that is too short, strings without a tokenizer, a sharded model,
            or one that `patch` refuses.
    """
    settings = Duo(sparsity=sparsity, sinks=sinks, recent=recent)
    if tp_size(model) > 1:
        raise ValueError(f"expected an unsharded model, got one on {tp_size(model)} ranks")
    prompts = [_ids(text, tokenizer, sinks + recent) for text in texts]
    if not prompts:
        raise ValueError("expected at least one text to calibrate on, got none")
    fresh, training = not is_patched(model), model.training
    if fresh:
        patch(model, "full")
    try:
        model.eval()
        found = [_measure(model, ids.to(model.device), settings) for ids in prompts]
    finally:
        model.train(training)
        if fresh:
            unpatch(model)
    wrong, total = (torch.stack([pair[i] for pair in found]).sum(0) for i in (0, 1))
    gates = wrong / (wrong + total).clamp_min(torch.finfo(total.dtype).tiny)
    return Duo(tuple(tuple(layer) for layer in gates.tolist()), sparsity, sinks, recent)


def _ids(text: str | Tensor, tokenizer: Any, window: int) -> Tensor:
    """Ids [1, T] of one text."""
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError("expected a tokenizer with texts that are strings, got none")
        ids = torch.tensor([tokenizer(text)["input_ids"]])
    else:
        ids = text if text.ndim == 2 else text[None]
    if ids.shape[0] != 1 or ids.shape[1] <= window:
        raise ValueError(
            f"expected texts of more than {window} tokens (sinks + recent), one at a time, got "
            f"ids of shape {list(ids.shape)}"
        )
    return ids


@torch.no_grad()
def _measure(model: PreTrainedModel, ids: Tensor, settings: Duo) -> tuple[Tensor, Tensor]:
    """Squared norms of what is wrong and of the output, fp64 [layers, HK] each, on the host."""
    cache = _CalibrationCache(model, settings)
    model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_key(model): cache})
    rows = [cache.found[layer].cpu() for layer in sorted(cache.found)]
    if not rows:
        raise ValueError(f"expected full-attention layers, got none in {type(model).__name__}")
    wrong, total = torch.stack(rows).unbind(1)
    return wrong, total


class _CalibrationCache(SparseCache):
    """Attends densely, keeps nothing, and measures. found[layer]: fp64 [2, HK]."""

    def __init__(self, model: PreTrainedModel, settings: Duo) -> None:
        super().__init__(Full(), 1, layer_specs(model))
        self.found: dict[int, Tensor] = {}
        self.layers = [
            _CalibrationLayer(self.state, i, settings, self.found) for i in range(len(self.layers))
        ]


class _CalibrationLayer(SparseLayer):
    """One layer of a `_CalibrationCache`; sliding layers only attend."""

    def __init__(self, state: Any, layer: int, settings: Duo, found: dict[int, Tensor]) -> None:
        super().__init__(state, layer)
        self.settings, self.found = settings, found

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scores: Scores,
        window: int | None,
    ) -> Tensor:
        self.state.seen[self.layer] += q.shape[2]
        own = self.state.layers[self.layer].window
        full, _ = _attention(q, k, v, scores, window=own)
        if own is None:
            first = self.settings.sinks + self.settings.recent
            wrong = full[first:].float() - _streaming(q, k, v, scores, self.settings)
            heads = (k.shape[1], -1)
            sums = [x.double().square().sum((0, 2)) for x in (wrong, full[first:])]
            self.found[self.layer] = torch.stack([x.view(heads).sum(1) for x in sums])
        return full[None]


def _attention(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, *, sink: bool = True, **more: Any
) -> tuple[Tensor, Tensor]:
    """out [Tq, HQ, D] and lse [HQ, Tq] of one row. sink: a sink logit of the model takes part."""
    tokens_q, tokens_k = q.shape[2], k.shape[2]
    cu_q, cu_k = (
        torch.tensor([0, n], dtype=torch.int32, device=q.device) for n in (tokens_q, tokens_k)
    )
    flat = [x[0].transpose(0, 1) for x in (q, k, v)]
    with device_of(q):
        return prefill_attention(
            flat[0], flat[1], flat[2], cu_q, cu_k, tokens_q, tokens_k,
            softmax_scale=scores.softmax_scale, softcap=scores.softcap,
            sinks=scores.sinks if sink else None, **more,
        )  # fmt: skip


def _streaming(q: Tensor, k: Tensor, v: Tensor, scores: Scores, settings: Duo) -> Tensor:
    """Attention of the tokens from sinks + recent on to their window and the sinks, fp32.

    Returns [T - sinks - recent, HQ, D].
    """
    first = settings.sinks + settings.recent
    out, lse = _attention(q, k, v, scores, window=settings.recent)
    out, lse = out[first:].float(), lse[:, first:].float()
    if not settings.sinks:
        return out
    k, v = k[:, :, : settings.sinks], v[:, :, : settings.sinks]
    sink_out, sink_lse = _attention(q[:, :, first:], k, v, scores, sink=False, causal=False)
    share = torch.sigmoid(sink_lse.float() - lse).T[..., None]  # of two softmaxes merged by lse
    return out + share * (sink_out.float() - out)
