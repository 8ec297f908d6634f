"""Page selection: a decode step reads the pages that its query could attend most (Quest).

Everything stays cached. Beside every page lie the bounds of its keys (`kernels/pages.py`); a step
scores all pages by them, and the paged kernel attends the best ones through a table of its own.
All of it has shapes that lengths do not change, so a captured step works.
"""

from __future__ import annotations

from torch import Tensor

from sparsekv.kernels.pages import page_scores, page_table, update_bounds
from sparsekv.kernels.topk import select_topk
from sparsekv.plan import UNLIMITED
from sparsekv.state import SparseState
from sparsekv.step import Part


def note_keys(state: SparseState, layer: int, part: Part, k: Tensor) -> None:
    """Fold the keys [B, HK, T, D] that a part has just appended into the bounds of their pages."""
    store, local = state.store(layer)
    pool = store.pool
    if pool.page_min is None or pool.page_max is None or layer not in state.ordinal:
        return
    update_bounds(
        k, pool.page_min, pool.page_max, store.block_table[local], store.seqlens[local],
        part.on(k.device).used, pool.page_size,
    )  # fmt: skip


def attended_pages(state: SparseState, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
    """Block table int32 [B, HK, K] and lengths int32 [B, HK] of what a query [B, HQ, D] attends.

    All that is cached unless the plan says `select`; then the best pages in ascending order, the
    first and the newest always among them, so that the partly filled one stays last.
    """
    assert state.limits is not None
    store, local = state.store(layer)
    pool, table, lens = store.pool, store.block_table[local], store.seqlens[local]
    select = state.limits.select[layer]
    if pool.page_min is None or pool.page_max is None or (select == UNLIMITED).all():
        return table, lens
    budget, size = state.limits.select_on(q.device, layer), pool.page_size
    scores, pages, quota = page_scores(
        q, pool.page_min, pool.page_max, table, lens, budget, size, pin_ends=True
    )
    most = max(2, -(-int(select.max()) // size))
    index, count = select_topk(
        scores.flatten(0, 1).float(), pages.flatten(), quota.flatten(), max_k=most
    )
    index, count = index.unflatten(0, lens.shape), count.view(lens.shape)
    return page_table(index, count, pages, table, lens, size)
