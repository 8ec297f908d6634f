"""Loss curves: what later queries lose when a head keeps k keys of a prompt.

    order    the prompt's keys j < n, best first: its last w, then by the vote of its last w rows
    error    l_lh(k) = sum_i |W_h (o_i(k) - o_i)|^2 / |x_li|^2, over the sum of all l_lh(w)
    mass     l_lh(k) = mean_i sum_{j in order[k:]} A_lhij, over L HK

over the queries i = n .. n + F - 1 of the heads of KV head h. o_i(k): attention over order[:k] and
the keys from n on; o_i: over all; W_h: the columns of the output projection of these heads; x_li:
the residual stream behind the layer. So an error is what eviction adds to the stream, in the size
that the next norm leaves of it (`damage.py`); errors of different heads are added as if they were
independent.

A text of n + F tokens plays both parts: its first n are the prompt, the queries of its last F come
later. So a curve counts what SnapKV's ranking finds, not what an oracle would: votes come from the
prompt alone, the loss from rows that had no vote. Nothing is of size T x T: two sums of columns a
layer, by `column_scores`, and for errors one attention of F rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparsekv.diagnose.damage import damage
from sparsekv.hf.check import check_positions
from sparsekv.hf.layers import decoder_modules
from sparsekv.hf.parts import output_projections
from sparsekv.hf.watch import Attended, watch
from sparsekv.kernels.column_scores import column_scores
from sparsekv.policies import SnapKV
from sparsekv.policies.base import one_of, pool_columns

_COARSE = 4  # steps of the grid are at least a page, and a quarter of the count that they start at


@dataclass(frozen=True)
class Curves:
    """loss float64 [N, L, HK, K]: of N texts, the full-attention layers, the KV heads.

    slots int [K]: the kept counts that the last axis stands for, from the window to all `tokens` of
    the prompt.
    """

    loss: np.ndarray
    slots: np.ndarray
    tokens: int


def loss_curves(
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    *,
    scorer: SnapKV,
    later: int,
    measure: str = "error",
    page: int = 16,
) -> Curves:
    """One dense forward a text; texts: ids int64 [1, n + later], equally long.

    measure: "error" or "mass", see the module docstring.

    Raises:
        ValueError: no text, different lengths, one without a token beyond window and later or
            beyond the model's positions, an unknown measure, a model without full-attention layers
            or whose decoder layers or output projections cannot be found, one that `watch` refuses,
            or losses that are not finite.
    """
    one_of("measure", measure, ("error", "mass"))
    lengths = sorted({int(ids.shape[1]) for ids in texts})
    if len(lengths) != 1 or lengths[0] <= scorer.window + later or later < 1:
        raise ValueError(
            f"expected texts of one length above {scorer.window + later} tokens (window + later), "
            f"got {lengths}"
        )
    check_positions(model, lengths[0])
    tokens = lengths[0] - later
    slots = _grid(scorer.window, tokens, page)
    make = _errors if measure == "error" else _missed
    found = [make(model, ids, scorer, slots) for ids in texts]
    if not found[0].size:
        raise ValueError(f"expected full-attention layers, got none in {type(model).__name__}")
    loss = np.stack(found)
    if not np.isfinite(loss).all():
        raise ValueError("expected finite losses, got NaN or infinity: does the model overflow?")
    return Curves(loss, slots, tokens)


def _grid(first: int, last: int, page: int) -> np.ndarray:
    counts = [first]
    while counts[-1] + page < last:
        step = page * max(1, counts[-1] // (_COARSE * page))
        counts.append(min(counts[-1] + step, last))
    return np.array(counts if counts[-1] == last else [*counts, last])


def _errors(model: PreTrainedModel, ids: Tensor, scorer: SnapKV, slots: np.ndarray) -> np.ndarray:
    """l [L, HK, K] of one text by "error"."""
    purpose, tokens = "to measure errors behind them", int(slots[-1])
    weights = output_projections(model, purpose)
    errors: dict[int, Tensor] = {}
    rows: list[np.ndarray] = []

    def see(seen: Attended) -> None:
        if seen.window is None:
            order = _order(seen, scorer, tokens)
            errors[seen.layer] = damage(seen, order, slots, weights[seen.layer])

    def behind(layer: int, module: nn.Module, args: Any, output: Any) -> None:
        if layer in errors:
            stream = (output[0] if isinstance(output, tuple) else output)[0, tokens:]
            size = stream.float().square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
            error = errors.pop(layer).double() / size[:, None]  # [HK, F, K]
            rows.append(error.sum(1).cpu().numpy())

    layers = decoder_modules(model, purpose)
    handles = [x.register_forward_hook(partial(behind, i)) for i, x in enumerate(layers)]
    try:
        watch(model, ids, see)
    finally:
        for handle in handles:
            handle.remove()
    table = np.array(rows)
    return table / max(table[..., 0].sum(), np.finfo(float).tiny) if rows else table


def _missed(model: PreTrainedModel, ids: Tensor, scorer: SnapKV, slots: np.ndarray) -> np.ndarray:
    """l [L, HK, K] of one text by "mass"."""
    rows: list[np.ndarray] = []
    tokens, total = int(slots[-1]), ids.shape[1]

    def see(seen: Attended) -> None:
        if seen.window is None:
            later = _columns(seen, tokens, total, "mean")[:, :tokens].double() / (total - tokens)
            kept = later.gather(-1, _order(seen, scorer, tokens)).cumsum(-1)
            lost = kept[:, -1:] - kept[:, torch.from_numpy(slots - 1).to(kept.device)]
            rows.append(lost.cpu().numpy())

    watch(model, ids, see)
    table = np.array(rows)
    return table / max(table[..., 0].size, 1) if rows else table


def _order(seen: Attended, scorer: SnapKV, tokens: int) -> Tensor:
    """The prompt's keys as the policy ranks them, int64 [HK, tokens]."""
    first = tokens - scorer.window
    votes = _columns(seen, first, tokens, scorer.group)[:, :tokens]
    limit = torch.full((1, len(votes)), first, device=votes.device)
    score = pool_columns(votes[None], scorer.kernel, scorer.pool, limit)[0]
    score[:, first:] = torch.inf
    # Equal scores: the newer key first, as the policies do.
    order = score.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    return tokens - 1 - order


def _columns(seen: Attended, first: int, end: int, group: str) -> Tensor:
    """Column sums of the query rows first .. end: fp32 [HK, T]."""
    rows = torch.zeros(seen.q.shape[0], device=seen.q.device)
    rows[first:end] = 1.0
    return column_scores(
        seen.q, seen.k, seen.lse, *seen.lengths, rows=len(rows) - first, row_weights=rows,
        group=group, **seen.geometry,  # type: ignore[arg-type]
    )[0]  # fmt: skip
