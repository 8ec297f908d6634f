"""DuoAttention's head classes: gates [L, HK] -> which heads see everything."""

from __future__ import annotations

from collections.abc import Sequence

from reference.types import Plan


def retrieval_heads(gates: Sequence[Sequence[float]], sparsity: float) -> list[list[bool]]:
    """True for heads at or above the `sparsity` quantile of all gates.

    numpy's quantile lies at rank sparsity * (n - 1) of the ascending gates, so what is below it is
    as many heads as that rank rounded up. Of equal gates the first (layer, head) is retrieval.
    """
    cells = [(a, l, h) for l, row in enumerate(gates) for h, a in enumerate(row)]
    best_first = sorted(cells, key=lambda cell: (-cell[0], cell[1], cell[2]))
    rank = round(sparsity * (len(cells) - 1), 9)
    streaming = -int(-rank // 1)
    chosen = {(l, h) for _, l, h in best_first[: len(cells) - streaming]}
    return [[(l, h) in chosen for h in range(len(row))] for l, row in enumerate(gates)]


def duo_plans(
    gates: Sequence[Sequence[float]], sparsity: float, sinks: int, recent: int, slots: int
) -> list[Plan]:
    """Retrieval heads keep everything; the others first and last tokens, `slots` at most."""
    held = min(sinks + recent, slots)
    sinks = min(sinks, slots // 2)
    window = Plan(held, sinks, held - sinks, "replace")
    everything = Plan(None)
    return [
        Plan(held, heads=[everything if full else window for full in row])
        for row in retrieval_heads(gates, sparsity)
    ]
