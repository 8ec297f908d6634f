"""What one step asks of one group of sparse layers: the batch as the builder sees it.

vLLM gives lengths and block tables; a request is known by its row of the runner's table where the
runner says so, else by its first block. All decisions are made here, on the host, from counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsekv.vllm.layout import Ints, Layout, RowState, Slots


@dataclass(frozen=True)
class Step:
    """One step of B requests. Host arrays [B], but for `query_start` [B + 1].

    slots: the request's place in the state and in the ring of queries.
    computed: tokens cached before the step; before, now: the first recent block, see `layout`.
    """

    slots: Ints
    query_start: Ints
    computed: Ints
    before: Ints
    now: Ints

    @property
    def moving(self) -> NDArray[np.int64]:
        """Rows of which blocks before .. now must go, after what is worth keeping was pinned."""
        return np.flatnonzero(self.now > self.before)

    @property
    def lengths(self) -> Ints:
        """Tokens of each request after the step, kept or not."""
        return self.computed + np.diff(self.query_start)


class Tracker:
    """Turns vLLM's description of a step into a `Step`, and remembers where requests stand."""

    def __init__(self, layout: Layout, max_num_seqs: int) -> None:
        self.layout = layout
        self.state = RowState(layout, max_num_seqs)
        self._slots = Slots(max_num_seqs)

    def step(self, common: Any) -> Step | None:
        """The step that `common`, a CommonAttentionMetadata, describes, without padded rows.

        None for a step of no request: a warm-up has tokens that are in no prompt.
        """
        rows = self._real_rows(common)
        query_start = common.query_start_loc_cpu[: rows + 1].numpy().astype(np.int64)
        lengths = common.seq_lens_cpu_upper_bound[:rows].numpy().astype(np.int64)
        computed = lengths - np.diff(query_start)
        prefilling = common.is_prefilling[:rows].numpy()
        if not (prefilling | (computed > 0)).any():
            return None
        slots = self._slots_of(common, computed)
        before, now = self.state.advance(slots, computed, prefilling)
        return Step(slots, query_start, computed, before, now)

    def _real_rows(self, common: Any) -> int:
        """Rows that hold a request: those before the first without a query token."""
        queries = common.query_start_loc_cpu.diff()[: common.num_reqs]
        return int((queries > 0).sum())

    def _slots_of(self, common: Any, computed: Ints) -> Ints:
        rows = len(computed)
        table_rows = getattr(common, "req_idx", None)
        if table_rows is not None:
            return np.asarray(table_rows[:rows], dtype=np.int64)
        if common.block_table_tensor.device.type != "cpu":
            raise ValueError(
                "expected a model runner that numbers its requests (V2: "
                "VLLM_USE_V2_MODEL_RUNNER=1), got one that does not"
            )
        return self._slots.of(common.block_table_tensor[:rows, 0].tolist(), computed.tolist())


def shorten(step: Step, layout: Layout, common: Any) -> tuple[Tensor, Tensor]:
    """(block tables [B', M], lengths [B']) of what is held: pinned blocks, then recent ones.

    Row i of the table loses its blocks P .. now[i]; rows beyond the step's stay as they are.
    """
    table, lengths = common.block_table_tensor.clone(), common.seq_lens.clone()
    width = table.shape[1]
    for row in np.flatnonzero(step.now > layout.pinned_blocks).tolist():
        gap = int(step.now[row]) - layout.pinned_blocks
        moved = table[row, int(step.now[row]) :].clone()
        table[row, layout.pinned_blocks : width - gap] = moved
        lengths[row] -= gap * layout.block_size
    return table, lengths


def store_queries(query: Tensor, ring: Tensor, step: Step) -> None:
    """Write the newest queries of each request into its part of the ring, by position.

    query [T, HQ, D], ring [slots, R, HQ, D]: the query at position p stands at p mod R.
    """
    rows = ring.shape[1]
    for slot, end, length, count in zip(
        step.slots, step.query_start[1:], step.lengths, np.diff(step.query_start), strict=True
    ):
        kept = min(int(count), rows)
        places = torch.arange(length - kept, length) % rows
        ring[slot, places] = query[end - kept : end]
