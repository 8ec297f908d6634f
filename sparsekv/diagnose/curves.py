"""Loss curves: what is lost of later queries' attention when a head keeps k keys of a prompt.

    order    the prompt's keys j < n, best first: its last w, then by the vote of its last w rows
    error    l_lh(k) = sum_i |W_h (o_i(k) - o_i)|^2 / the sum over all layers and heads of l_lh(w)
    mass     l_lh(k) = mean_i sum_{j in order[k:]} A_lhij / (L HK)

over the queries i = n .. n + F - 1 of the heads of KV head h. o_i(k): attention over order[:k] and
the keys from n on; o_i: over all; W_h: the columns of the output projection of these heads, so that
an error is what is added to the residual stream (`damage.py`). A text of n + F tokens plays both
parts: its first n are the prompt, the queries of its last F come later. So a curve counts what
SnapKV's ranking finds, not what an oracle would: votes come from the prompt alone, the loss from
rows that had no vote.

Losses add up over heads: with equal shares of nothing, all is lost, 1 of error. Nothing is of size
T x T: two sums of columns a layer, by `column_scores`, and for errors one attention of F rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparsekv.diagnose.damage import damage
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
        ValueError: no text, different lengths, one without a token beyond window and later, an
            unknown measure, a model without full-attention layers or whose output projections
            cannot be found, or one that `watch` refuses.
    """
    one_of("measure", measure, ("error", "mass"))
    lengths = sorted({int(ids.shape[1]) for ids in texts})
    if len(lengths) != 1 or lengths[0] <= scorer.window + later or later < 1:
        raise ValueError(
            f"expected texts of one length above {scorer.window + later} tokens (window + later), "
            f"got {lengths}"
        )
    tokens = lengths[0] - later
    slots = _grid(scorer.window, tokens, page)
    curve = _curve_of(model, scorer, slots, measure)
    found = []
    for ids in texts:
        rows: list[np.ndarray] = []
        watch(model, ids, partial(_look, rows, curve))
        if not rows:
            raise ValueError(f"expected full-attention layers, got none in {type(model).__name__}")
        table = np.stack(rows)
        whole = table[..., 0].sum() if measure == "error" else table[..., 0].size
        found.append(table / max(whole, np.finfo(float).tiny))
    return Curves(np.stack(found), slots, tokens)


def _grid(first: int, last: int, page: int) -> np.ndarray:
    counts = [first]
    while counts[-1] + page < last:
        step = page * max(1, counts[-1] // (_COARSE * page))
        counts.append(min(counts[-1] + step, last))
    return np.array(counts if counts[-1] == last else [*counts, last])


_Curve = Callable[[Attended], np.ndarray]


def _look(rows: list[np.ndarray], curve: _Curve, seen: Attended) -> None:
    if seen.window is None:
        rows.append(curve(seen))


def _curve_of(model: PreTrainedModel, scorer: SnapKV, slots: np.ndarray, measure: str) -> _Curve:
    """What makes the [HK, K] of a layer."""
    if measure == "mass":
        return lambda seen: _missed(seen, _order(seen, scorer, int(slots[-1])), slots)
    weights = output_projections(model, "to measure errors behind them")
    return lambda seen: damage(
        seen, _order(seen, scorer, int(slots[-1])), slots, weights[seen.layer]
    )


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


def _missed(seen: Attended, order: Tensor, slots: np.ndarray) -> np.ndarray:
    """Mass that later rows put on keys beyond the best `slots`: [HK, K]."""
    tokens, rows = order.shape[1], seen.q.shape[0] - order.shape[1]
    later = _columns(seen, tokens, tokens + rows, "mean")[:, :tokens].double() / rows
    kept = later.gather(-1, order).cumsum(-1)
    lost = kept[:, -1:] - kept[:, torch.from_numpy(slots - 1).to(kept.device)]
    return lost.cpu().numpy()


def _columns(seen: Attended, first: int, end: int, group: str) -> Tensor:
    """Column sums of the query rows first .. end: fp32 [HK, T]."""
    rows = torch.zeros(seen.q.shape[0], device=seen.q.device)
    rows[first:end] = 1.0
    return column_scores(
        seen.q, seen.k, seen.lse, *seen.lengths, rows=len(rows) - first, row_weights=rows,
        group=group, **seen.geometry,  # type: ignore[arg-type]
    )[0]  # fmt: skip
