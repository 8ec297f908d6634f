"""The readable oracle of the paged cache: a Python list of slot records per layer, row and KV head.

Slow and obvious on purpose. Tests hold `PagedKVCache` against it; nothing else uses it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """One cached token of one head. k, v: [D]."""

    k: Tensor
    v: Tensor
    position: int
    score: float


@dataclass
class DenseKVCache:
    """heads[layer][row][kv_head] is the list of slots of that head."""

    num_layers: int
    batch: int
    num_kv_heads: int
    heads: list[list[list[list[Slot]]]] = field(init=False)

    def __post_init__(self) -> None:
        self.heads = [
            [[[] for _ in range(self.num_kv_heads)] for _ in range(self.batch)]
            for _ in range(self.num_layers)
        ]

    def append(self, layer: int, k: Tensor, v: Tensor, position: int) -> None:
        """Append one token to every head. k, v: [B, HK, D]."""
        for row in range(self.batch):
            for head in range(self.num_kv_heads):
                slot = Slot(k[row, head], v[row, head], position, 0.0)
                self.heads[layer][row][head].append(slot)

    def keep(self, layer: int, positions: list[list[set[int]]]) -> None:
        """Keep the tokens of a layer whose position is in positions[row][head]."""
        for row in range(self.batch):
            for head in range(self.num_kv_heads):
                slots = self.heads[layer][row][head]
                kept = [slot for slot in slots if slot.position in positions[row][head]]
                self.heads[layer][row][head] = kept

    def select_rows(self, rows: list[int]) -> None:
        """Row i becomes a copy of old row rows[i]."""
        self.heads = [[copy.deepcopy(layer[row]) for row in rows] for layer in self.heads]
        self.batch = len(rows)

    def gather(self, layer: int, row: int, head: int) -> tuple[Tensor, Tensor, list[int]]:
        """K [S, D], V [S, D] and positions of one head in position order."""
        slots = sorted(self.heads[layer][row][head], key=lambda slot: slot.position)
        if not slots:
            return torch.empty(0), torch.empty(0), []
        k = torch.stack([slot.k for slot in slots])
        v = torch.stack([slot.v for slot in slots])
        return k, v, [slot.position for slot in slots]
