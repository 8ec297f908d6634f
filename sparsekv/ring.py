"""The last queries of each row, for layers that compress between decode steps.

A compression asks what the last W queries make of the keys that are held, and most of those queries
are decode steps that a CUDA graph ran. So every step writes its query into fixed memory: the query
at position p lies in entry p % W. All tokens of a row pass by, prompts included; so the newest
position alone says which query an entry holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsekv.headwise import Queries, Scores
from sparsekv.policies.base import Phase, Policy
from sparsekv.policies.features import GroupMaxWindow


@dataclass(frozen=True)
class QueryRing:
    """q [B, HQ, W, D] after RoPE, W >= 0; scores: how the layer makes logits of them."""

    q: Tensor
    scores: Scores

    @classmethod
    def of(cls, queries: Queries, rows: int, newest: Tensor, scores: Scores) -> QueryRing:
        """A ring of `rows` entries that holds `queries`, at most `rows` of them.

        newest: int32 [B] position of each row's last query.
        """
        batch, heads, tokens, dim = queries.q.shape
        ring = queries.q.new_zeros(batch, heads, rows, dim)
        # Columns of padding stand where positions would be negative: `read` does not believe them.
        entry = _entries(newest, tokens, rows)
        return cls(ring.scatter_(2, _along_heads(entry, ring), queries.q), scores)

    @property
    def rows(self) -> int:
        """W."""
        return self.q.shape[2]

    def write(self, q: Tensor, entry: Tensor) -> None:
        """One query a row, q [B, HQ, 1, D], into entry int64 [B]; in place."""
        if self.rows:
            self.q.scatter_(2, _along_heads(entry[:, None], self.q), q)

    def read(self, newest: Tensor, rows: int) -> Queries:
        """The last `rows` <= W queries by position; missing ones sit at -1.

        newest: int32 [B] position of each row's last query.
        """
        age = torch.arange(rows - 1, -1, -1, dtype=torch.int32, device=newest.device)
        positions = (newest[:, None] - age).clamp_min(-1)
        entry = _entries(newest, rows, self.rows)
        q = self.q.gather(2, _along_heads(entry, self.q))
        return Queries(q, positions, (newest + 1).clamp(max=rows))

    def select_rows(self, rows: Tensor) -> QueryRing:
        """The ring of the given rows, int64."""
        return replace(self, q=self.q[rows])

    def clone(self) -> QueryRing:
        """A copy that later steps do not write to."""
        return replace(self, q=self.q.clone())


def window_rows(policy: Policy, ordinal: int, phase: Phase) -> int:
    """How many last queries the policy's questions in that layer and phase look back on."""
    need = policy.needs(ordinal, phase)
    rows = [need.rows] if need is not None and need.rows is not None else []
    asked = policy.features(ordinal, phase)
    rows += [feature.rows for feature in asked if isinstance(feature, GroupMaxWindow)]
    return max(rows, default=0)


def _entries(newest: Tensor, count: int, rows: int) -> Tensor:
    """Entries of the last `count` positions of each row, int64 [B, count]."""
    age = torch.arange(count - 1, -1, -1, device=newest.device)
    return (newest[:, None] - age) % max(rows, 1)


def _along_heads(entry: Tensor, q: Tensor) -> Tensor:
    """Entries [B, n] as a gather index [B, HQ, n, D] of q."""
    return entry[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
