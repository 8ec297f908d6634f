"""Attention by layer and query head: where it goes, how far, how widely.

Over the queries i from `sinks` + `recent` on (before, sinks and recent tokens are all there is):

    sink share    mean_i  sum_{j < sinks} A_hij
    locality      mean_i  sum_{i - recent < j <= i} A_hij
    entropy       mean_i  H_hi                  H_hi = - sum_j A_hij log A_hij, in nats
    spread        mean_i  H_hi / log n_i        n_i keys that query i sees; 1: evenly over all
    mass of k     the k largest columns' share of sum_ij A_hij

All of it from kernels, given the log-sum-exp: sums of columns over all rows and over a sliding
window (`column_scores`), entropies of rows (`row_entropy`). Nothing of size T x T; beside Q, K and
V a layer takes a few numbers a token and head. A sink logit of the model counts as one more key in
the entropy, and as no column.

PyramidKV's picture of attention (wide below, narrow above) is about this. Massive activations, of
`activations.py`, are numbers of the residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparsekv.hf.check import check_positions
from sparsekv.hf.watch import Attended, watch
from sparsekv.kernels.column_scores import column_scores
from sparsekv.kernels.row_entropy import row_entropy


@dataclass(frozen=True)
class HeadTable:
    """Each fp32 [L, HQ], see the module docstring; mass [L, HQ, len(top)] of the counts `top`.

    windows: of each layer, the tokens that a query sees, or None; `tokens` of the text.
    """

    sinks: int
    recent: int
    top: tuple[int, ...]
    tokens: int
    windows: tuple[int | None, ...]
    sink_share: Tensor
    locality: Tensor
    entropy: Tensor
    spread: Tensor
    mass: Tensor


def attention(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    sinks: int = 4,
    recent: int = 64,
    top: Sequence[int] = (16, 64, 256, 1024),
) -> HeadTable:
    """Run ids int64 [1, T] through the model densely and describe every head.

    top: numbers of columns; one above T stands for all of them.

    Raises:
        ValueError: a text that is not longer than sinks + recent, or too long, settings below 1
            (sinks: 0), a sharded model, or one that `sparsekv.patch` refuses.
    """
    if sinks < 0 or min(recent, *top, 1) < 1:
        raise ValueError(
            f"expected sinks >= 0 and recent, top >= 1, got {sinks}, {recent}, {list(top)}"
        )
    if ids.shape[-1] <= sinks + recent:
        raise ValueError(
            f"expected a text of more than {sinks + recent} tokens (sinks + recent), got "
            f"{ids.shape[-1]}"
        )
    check_positions(model, ids.shape[-1])
    collected = _Collected(sinks, recent, tuple(top))
    watch(model, ids, collected.see)
    columns = [torch.stack(rows) for rows in zip(*collected.rows, strict=True)]
    return HeadTable(sinks, recent, tuple(top), ids.shape[1], tuple(collected.windows), *columns)


@dataclass
class _Collected:
    """Described layers: rows of (sink share, locality, entropy, spread, mass) on the host."""

    sinks: int
    recent: int
    top: tuple[int, ...]
    rows: list[list[Tensor]] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)

    def see(self, seen: Attended) -> None:
        """One layer more."""
        described = describe(seen, self.sinks, self.recent, self.top)
        self.rows.append([x.float().cpu() for x in described])
        self.windows.append(seen.window)


def describe(
    seen: Attended, sinks: int, recent: int, top: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(sink share, locality, entropy, spread [HQ], mass [HQ, len(top)]) of one layer."""
    tokens = seen.q.shape[0]
    rows = tokens - sinks - recent
    local = recent if seen.window is None else min(recent, seen.window)
    columns = head_columns(seen, rows, seen.window)
    near = head_columns(seen, rows, local).sum(-1) / rows
    ranked = columns.sort(dim=-1, descending=True).values.cumsum(-1)
    counts = torch.tensor([min(k, tokens) for k in top], device=ranked.device)
    mass = ranked[:, counts - 1] / ranked[:, -1:]
    entropy = _entropy(seen)[:, -rows:]
    visible = torch.arange(tokens - rows + 1, tokens + 1, device=entropy.device)
    if seen.window is not None:
        visible = visible.clamp_max(seen.window)
    if seen.scores.sinks is not None:
        visible = visible + 1
    spread = entropy / visible.log().clamp_min(1e-9)  # of one key there is nothing to spread
    return columns[:, :sinks].sum(-1) / rows, near, entropy.mean(-1), spread.mean(-1), mass


def head_columns(seen: Attended, rows: int, window: int | None) -> Tensor:
    """Sums of columns over the last `rows` queries, by query head: fp32 [HQ, T].

    window: only what a query attends among its last `window` tokens. The kernel reduces the heads
    of a group, so it gets one of each group at a time.
    """
    group = seen.q.shape[1] // seen.k.shape[1]
    geometry = seen.geometry | {"window": window}
    found = [
        column_scores(
            seen.q[:, g::group], seen.k, seen.lse[g::group], *seen.lengths, rows=rows, **geometry
        )[0]
        for g in range(group)
    ]
    return torch.stack(found, 1).flatten(0, 1)


def _entropy(seen: Attended) -> Tensor:
    """Of every row, a learned sink included: fp32 [HQ, T]."""
    entropy = row_entropy(seen.q, seen.k, seen.lse, *seen.lengths, **seen.geometry)
    if seen.scores.sinks is None:
        return entropy
    share = torch.exp(seen.scores.sinks.float()[:, None] - seen.lse)
    return entropy + torch.special.entr(share)
