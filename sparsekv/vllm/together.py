"""What the groups of sparse layers of one layout share in a step on a GPU.

vLLM builds the metadata of one group of layers after the other, though they differ in nothing but
their blocks: the same requests stand at the same places. So the first group of a step finds out
what the step asks for, and says so to the device; the last one has all of them cut, and the tables
of all written, before the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekv.kernels.block_tables import Tables, shorten_tables
from sparsekv.vllm.cutting import Cutter
from sparsekv.vllm.layout import Layout
from sparsekv.vllm.rows import Step, Tracker


class Together:
    """Groups of layers `names` of one layout. None for `cutter`: no scores decide what is pinned.

    max_num_seqs: requests at once; rows: most rows of a step, those of captured graphs included.
    On `device`, read by captured graphs: sent int32 [3, rows], first recent blocks, slots and the
    number of tokens gone of the step's requests; lengths int32 [rows], the tokens that they hold.
    metadata: what the first group of the step has made of it, for the others.
    """

    def __init__(
        self, layout: Layout, names: Sequence[str], cutter: Cutter | None, max_num_seqs: int,
        rows: int, device: Any,
    ) -> None:  # fmt: skip
        self.layout, self.names, self.cutter = layout, list(names), cutter
        self.tracker = Tracker(layout, max_num_seqs)
        self.sent = torch.zeros(3, rows, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self.metadata: Any = None
        self.step: Step | None = None
        self._rows = 0
        self._came: list[tuple[Sequence[str], Tensor, Tensor]] = []  # names, table, out of a group
        self._tables: Tables | None = None

    def enter(self, common: Any, names: Sequence[str], out: Tensor, real: bool) -> bool:
        """A group of layers `names` comes with its description of a step; True: it is the first.

        out: int32 [>= rows, >= M], for the blocks that its layers hold; filled when all have come.
        real: requests are served; otherwise a graph is captured. Raises ValueError where a group
        comes again before all have come, or with another number of rows than the first.
        """
        first = not self._came
        if first:
            self._rows, self.metadata = common.num_reqs, None
            self.step = self.tracker.step(common) if real else None
            self._send(self.step, common)
        came = {name for some, *_ in self._came for name in some}
        again = sorted(came & set(names))
        if again or common.num_reqs != self._rows:
            raise ValueError(
                f"expected every group of sparse layers once a step of {self._rows} rows, got "
                f"{again or list(names)} with {common.num_reqs} rows"
            )
        self._came.append((names, common.block_table_tensor[: self._rows], out))
        if len(came) + len(names) == len(self.names):
            self._finish()
        return first

    def _finish(self) -> None:
        """All groups have come: cut, then write what each still holds."""
        came, self._came = self._came, []
        if self.cutter is not None and self.step is not None:
            of_layer = {name: table for names, table, _ in came for name in names}
            self.cutter.cut(self.step, [of_layer[name] for name in self.names])
        tables, out = [table for _, table, _ in came], [to for *_, to in came]
        if self._tables is None or not self._tables.are(tables, out):
            self._tables = Tables.of(tables, out)
        first = self.sent[0, : self._rows]
        shorten_tables(self._tables, first, pinned=self.layout.pinned_blocks)

    def _send(self, step: Step | None, common: Any) -> None:
        """What `sent` and `lengths` say; of rows without a request: P, -1 and 0."""
        rows, pinned = common.num_reqs, self.layout.pinned_blocks
        values = np.empty((3, rows), dtype=np.int32)
        values[0], values[1], values[2] = pinned, -1, 0
        if step is not None:
            real = slice(len(step.now))
            values[0, real], values[1, real] = step.now, step.slots
            values[2, real] = (step.now - pinned) * self.layout.block_size
        sent = torch.from_numpy(values)
        if self.sent.is_cuda:
            sent = sent.pin_memory()  # kept by the allocator until the copy is done
        self.sent[:, :rows].copy_(sent, non_blocking=True)
        torch.sub(common.seq_lens[:rows], self.sent[2, :rows], out=self.lengths[:rows])
