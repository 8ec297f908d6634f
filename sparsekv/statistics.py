"""What a `Need` asks of packed queries and keys: one kernel call, whatever the statistic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparsekv.kernels.column_scores import column_scores
from sparsekv.kernels.perturb import perturbed_columns
from sparsekv.policies.base import Need

Lengths = tuple[Tensor, Tensor, int, int]  # cu_seqlens_q, cu_seqlens_k and the longest of each

_HAIR = 2.0**-16  # of a logarithm: some roundings of fp32


def statistic(
    need: Need,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    lengths: Lengths,
    seen: Callable[[], Tensor],
    layer: int,
    geometry: dict[str, Any],
    first_heads: Tensor | None = None,
) -> Tensor:
    """`need` as fp32 [N, HK, S], or [N, 1, S] for the group "layer_mean".

    q [Tq, HQ, D], k [Tk, HK, D] and lse [HQ, Tq] as in `column_scores`, geometry its keyword
    arguments. seen() -> how many keys each query sees, [Tq] in any shape, for "count".
    layer, first_heads: of the noise, see `perturbed_columns`; its temperature is the prompt's.
    """
    asked: dict[str, Any] = {"rows": need.rows, "group": need.group, **geometry}
    noise = need.noise
    if noise is not None:
        return perturbed_columns(
            q, k, *lengths, seed=noise.seed, layer=layer, tau=noise.tau_start, noise=noise.kind,
            first_heads=first_heads, **asked,
        )  # fmt: skip
    threshold = None
    if need.statistic == "count":
        # log(1 / t), the mean probability of a query that sees t keys. Less a hair: a key with just
        # the mean is not below it, whichever way fp32 rounds.
        threshold = -seen().clamp_min(1).float().log().flatten() - _HAIR
    return column_scores(
        q, k, lse, *lengths, statistic=need.statistic, log_threshold=threshold, **asked
    )
