"""Mass curves: what a head that keeps k keys of a prompt still has of what later queries attend.

    order    the prompt's keys j < n, best first: its last w, then by the vote of its last w rows
    m_lh(k)  = 1/F  mean_{h' in group}  sum_{n <= i < n + F}  sum_{j in order[:k]}  A_l,h',ij

A text of n + F tokens plays both parts: its first n are the prompt, the queries of its last F are
those that come later. So a curve counts what SnapKV's ranking finds, not what an oracle would:
votes come from the prompt alone, the mass from rows that had no vote. Two sums of columns a layer,
by `column_scores`; nothing of size T x T.

m_lh(n) is what is at stake in a head: the rest of a row's attention is on tokens after the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparsekv.hf.watch import Attended, watch
from sparsekv.kernels.column_scores import column_scores
from sparsekv.policies import SnapKV
from sparsekv.policies.base import pool_columns


@dataclass(frozen=True)
class Curves:
    """mass float64 [N, L, HK, K]: of N texts, the full-attention layers, the KV heads.

    slots int [K]: the kept counts that the last axis stands for, from the window to all `tokens` of
    the prompt, a page apart.
    """

    mass: np.ndarray
    slots: np.ndarray
    tokens: int


def mass_curves(
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    *,
    scorer: SnapKV,
    future: int,
    page: int = 16,
) -> Curves:
    """Measured with one dense forward a text; texts: ids int64 [1, n + future], equally long.

    Raises:
        ValueError: no text, different lengths, one without a token beyond window and future, a
            model without full-attention layers, or one that `watch` refuses.
    """
    lengths = sorted({int(ids.shape[1]) for ids in texts})
    if len(lengths) != 1 or lengths[0] <= scorer.window + future:
        raise ValueError(
            f"expected texts of one length above {scorer.window + future} tokens (window + "
            f"future), got {lengths}"
        )
    tokens = lengths[0] - future
    slots = np.append(np.arange(scorer.window, tokens, page), tokens)
    found = []
    for ids in texts:
        rows: list[np.ndarray] = []

        def see(seen: Attended, rows: list[np.ndarray] = rows) -> None:
            if seen.window is None:
                rows.append(_curve(seen, scorer, future, slots))

        watch(model, ids, see)
        if not rows:
            raise ValueError(f"expected full-attention layers, got none in {type(model).__name__}")
        found.append(np.stack(rows))
    return Curves(np.stack(found), slots, tokens)


def _curve(seen: Attended, scorer: SnapKV, future: int, slots: np.ndarray) -> np.ndarray:
    """m [HK, K] of one layer."""
    tokens = seen.q.shape[0] - future
    votes = _columns(seen, tokens - scorer.window, tokens, scorer.group)
    later = _columns(seen, tokens, tokens + future, "mean")[:, :tokens].double() / future
    limit = torch.full((1, len(votes)), tokens - scorer.window, device=votes.device)
    score = pool_columns(votes[None, :, :tokens], scorer.kernel, scorer.pool, limit)[0]
    score[:, tokens - scorer.window :] = torch.inf
    # Equal scores: the newer key first, as the policies do.
    order = score.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    mass = later.flip(-1).gather(-1, order).cumsum(-1)
    return mass[:, torch.from_numpy(slots - 1).to(mass.device)].cpu().numpy()


def _columns(seen: Attended, first: int, end: int, group: str) -> Tensor:
    """Column sums of the query rows first .. end: fp32 [HK, T]."""
    rows = torch.zeros(seen.q.shape[0], device=seen.q.device)
    rows[first:end] = 1.0
    return column_scores(
        seen.q, seen.k, seen.lse, *seen.lengths, rows=len(rows) - first, row_weights=rows,
        group=group, **seen.geometry,  # type: ignore[arg-type]
    )[0]  # fmt: skip
