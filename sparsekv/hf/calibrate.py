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

from sparsekv.hf.check import check_positions
from sparsekv.hf.watch import Attended, attention, watch
from sparsekv.policies import Duo


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
        ValueError: no text, a text that is too short or too long for the model, strings without a
            tokenizer, a sharded model, or one that `patch` refuses.
    """
    if isinstance(texts, str):
        raise ValueError("expected a list of texts, got a str")
    settings = Duo(sparsity=sparsity, sinks=sinks, recent=recent)
    prompts = [_ids(text, tokenizer, sinks + recent) for text in texts]
    if not prompts:
        raise ValueError("expected at least one text to calibrate on, got none")
    found = [_measure(model, ids, settings) for ids in prompts]
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


def _measure(model: PreTrainedModel, ids: Tensor, settings: Duo) -> tuple[Tensor, Tensor]:
    """Squared norms of what is wrong and of the output, fp64 [layers, HK] each, on the host."""
    rows: list[Tensor] = []

    def see(seen: Attended) -> None:
        if seen.window is None:
            rows.append(_wrong_and_total(seen, settings).cpu())

    check_positions(model, ids.shape[1])
    watch(model, ids, see)
    if not rows:
        raise ValueError(f"expected full-attention layers, got none in {type(model).__name__}")
    wrong, total = torch.stack(rows).unbind(1)
    return wrong, total


def _wrong_and_total(seen: Attended, settings: Duo) -> Tensor:
    """fp64 [2, HK]: squared norms over the tokens for which the two may differ."""
    first = settings.sinks + settings.recent
    full = seen.out[first:].float()
    heads = (seen.k.shape[1], -1)
    sums = [x.double().square().sum((0, 2)) for x in (full - _streaming(seen, settings), full)]
    return torch.stack([x.view(heads).sum(1) for x in sums])


def _streaming(seen: Attended, settings: Duo) -> Tensor:
    """Attention of the tokens from sinks + recent on to their window and the sinks, fp32.

    Returns [T - sinks - recent, HQ, D].
    """
    first, scores = settings.sinks + settings.recent, seen.scores
    q, k, v = (x.transpose(0, 1)[None] for x in (seen.q, seen.k, seen.v))
    out, lse = attention(q, k, v, scores, window=settings.recent)
    out, lse = out[first:].float(), lse[:, first:].float()
    if not settings.sinks:
        return out
    k, v = k[:, :, : settings.sinks], v[:, :, : settings.sinks]
    sink_out, sink_lse = attention(q[:, :, first:], k, v, scores, sink=False, causal=False)
    share = torch.sigmoid(sink_lse.float() - lse).T[..., None]  # of two softmaxes merged by lse
    return out + share * (sink_out.float() - out)
