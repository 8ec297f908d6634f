"""Rows of a sparse cache that are fed further tokens, and what the model answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sparsekv
from sparsekv.hf.compat import cache_key

# A column that no prompt reaches: up to it a cache takes single tokens for prompt, too.
_NEVER = 1 << 30


@dataclass(frozen=True)
class Rows:
    """Token ids as a left-padded batch: ids and mask int64 [B, T] on a device, lengths int [B]."""

    ids: Tensor
    mask: Tensor
    lengths: np.ndarray

    @classmethod
    def of(
        cls, rows: Sequence[Sequence[int]], pad: int, device: torch.device, width: int = 1
    ) -> Rows:
        """At least `width` columns. A row may be empty. Where that leaves one column, there are
        two: a lone column is a decode step, which takes no padding."""
        lengths = np.array([len(row) for row in rows])
        width = max(int(lengths.max()), 2 if (lengths == 0).any() else width)
        ids = np.full((len(rows), width), pad, dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :] = row
        mask = (np.arange(width) >= (width - lengths)[:, None]).astype(np.int64)
        return cls(torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device), lengths)

    def positions(self, start: np.ndarray | int = 0) -> Tensor:
        """int64 [B, T], rows that begin at `start` [B]; padding gets that of their first token."""
        rank = np.arange(self.ids.shape[1]) - (self.ids.shape[1] - self.lengths)[:, None]
        at = rank.clip(0) + np.reshape(start, (-1, 1))
        return torch.from_numpy(at.astype(np.int64)).to(self.ids.device)


class Conversation:
    """A cache with its rows' padding and lengths.

    Args:
        model: patched. pad: a token id.
    """

    def __init__(self, model: Any, cache: sparsekv.SparseCache, pad: int) -> None:
        self.model, self.cache, self.pad = model, cache, pad
        self.mask: Tensor | None = None
        self.lengths = np.zeros(0, dtype=np.int64)
        self._positions: Tensor | None = None

    def read(self, rows: Rows) -> None:
        """Note what the empty cache was given by somebody else."""
        self.mask, self.lengths = rows.mask, rows.lengths.astype(np.int64)

    def prefill(self, rows: Rows) -> None:
        """Feed a first prompt."""
        positions = rows.positions()
        mask = None if (rows.lengths == rows.ids.shape[1]).all() else rows.mask
        self._forward(rows.ids, positions, mask, keep=1)
        self.read(rows)

    def fork(self, places: Sequence[int]) -> None:
        """Row i becomes a copy of old row places[i]."""
        assert self.mask is not None
        if list(places) == list(range(len(self.lengths))):
            return
        index = np.asarray(places)
        self.cache.state.select_rows(index)
        self.mask = self.mask[torch.from_numpy(index).to(self.mask.device)]
        self.lengths = self.lengths[index]

    def chunk(self, tokens: Sequence[Sequence[int]], keep: int) -> Tensor:
        """Feed rows in one forward, upon which the policy acts; logits [B, keep, V] of its last
        columns. A single token is no decode step, either."""
        assert self.mask is not None
        rows = Rows.of(tokens, self.pad, self.mask.device)
        positions = rows.positions(self.lengths)
        self.mask = torch.cat([self.mask, rows.mask], 1)
        state = self.cache.state
        state.chunked_until = _NEVER
        logits = self._forward(rows.ids, positions, self.mask, keep)
        state.chunked_until = 0
        self.lengths = self.lengths + rows.lengths
        return logits

    def step(self, ids: Tensor) -> Tensor:
        """Feed one token a row, ids int64 [B], as a decode step; logits [B, V].

        Once a step is fed, only steps may follow.
        """
        if self._positions is None:
            self._positions = torch.from_numpy(self.lengths).to(ids.device)[:, None]
        logits = self._forward(ids[:, None], self._positions, None, keep=1)
        self._positions = self._positions + 1
        return logits[:, 0]

    @torch.no_grad()
    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: int) -> Tensor:
        return self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True,
            logits_to_keep=keep, **{cache_key(self.model): self.cache},
        ).logits  # fmt: skip
