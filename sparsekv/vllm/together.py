"""What the groups of sparse layers of one layout share in a step on a GPU.

vLLM builds the metadata of one group of layers after the other, though they differ in nothing but
their blocks: the same requests stand at the same places. So the first group of a step finds out
what the step asks for, and says so to the device; the last one has all of them cut, before the
forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekv.vllm.cutting import Cutter
from sparsekv.vllm.layout import Layout
from sparsekv.vllm.rows import Step, Tracker


class Together:
    """Groups of layers `names` of one layout. None for `cutter`: no scores decide what is pinned.

    max_num_seqs: requests at once; rows: most rows of a step, those of captured graphs included.
    On `device`, read by captured graphs: sent int32 [2, rows], first recent blocks and slots of the
    step's requests; lengths int32 [rows], the tokens that they hold, to be written by a group.
    metadata: what the first group of the step has made of it, for the others.
    """

    def __init__(
        self, layout: Layout, names: Sequence[str], cutter: Cutter | None, max_num_seqs: int,
        rows: int, device: Any,
    ) -> None:  # fmt: skip
        self.layout, self.names, self.cutter = layout, list(names), cutter
        self.tracker = Tracker(layout, max_num_seqs)
        self.sent = torch.zeros(2, rows, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self.metadata: Any = None
        self.step: Step | None = None
        self._rows = 0
        self._tables: dict[str, Tensor] = {}

    def enter(self, common: Any, names: Sequence[str], real: bool) -> bool:
        """A group of layers `names` comes with its description of a step; True: it is the first.

        real: requests are served; otherwise a graph is captured. Raises ValueError where a group
        comes again before all have come, or with another number of rows than the first.
        """
        first = not self._tables
        if first:
            self._rows, self.metadata = common.num_reqs, None
            self.step = self.tracker.step(common) if real else None
            self._send(self.step, self._rows)
        again = sorted(set(names) & set(self._tables))
        if again or common.num_reqs != self._rows:
            raise ValueError(
                f"expected every group of sparse layers once a step of {self._rows} rows, got "
                f"{again or list(names)} with {common.num_reqs} rows"
            )
        self._tables |= dict.fromkeys(names, common.block_table_tensor)
        if len(self._tables) == len(self.names):
            tables, self._tables = [self._tables[name] for name in self.names], {}
            if self.cutter is not None and self.step is not None:
                self.cutter.cut(self.step, tables)
        return first

    def _send(self, step: Step | None, rows: int) -> None:
        """First recent blocks and slots to the device; rows without a request: P and -1."""
        values = np.empty((2, rows), dtype=np.int32)
        values[0], values[1] = self.layout.pinned_blocks, -1
        if step is not None:
            values[0, : len(step.now)], values[1, : len(step.now)] = step.now, step.slots
        sent = torch.from_numpy(values)
        if self.sent.is_cuda:
            sent = sent.pin_memory()  # kept by the allocator until the copy is done
        self.sent[:, :rows].copy_(sent, non_blocking=True)
