"""One forward pass as the attention layers see it: which tokens of which row are real."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparsekv.cache.pages import upload

Made = TypeVar("Made")


@dataclass(frozen=True)
class RowTensors:
    """A `Part` on one device, all int32. cu [B+1], the others [B]; before = seen - used."""

    cu: Tensor
    used: Tensor
    pad: Tensor
    before: Tensor


@dataclass
class Part:
    """T consecutive columns of a forward that are treated alike, in every layer.

    kind: "prefill" (nothing cached yet), "chunk" (several tokens onto a cache) or "decode" (one).
    start: column of the first token, padding counted. Real tokens are a suffix of the T columns.
    lengths: int [B] real tokens among the T. seen: int [B] real tokens of the row so far, these
    included; so theirs are the positions seen - lengths .. seen - 1.
    columns: int [B, T] which columns of the forward these are, where rows take different ones, or
    None: T in a row. more: another part of the same prompt follows.
    """

    kind: str
    start: int
    tokens: int
    lengths: np.ndarray
    seen: np.ndarray
    _device: dict[torch.device, RowTensors] = field(default_factory=dict)
    columns: np.ndarray | None = None
    more: bool = False
    _made: dict[Hashable, Any] = field(default_factory=dict)

    def on(self, device: torch.device) -> RowTensors:
        """The rows as sequences of a flat [B * T] token axis, on `device`."""
        if device not in self._device:
            batch = len(self.lengths)
            pad = self.tokens - self.lengths
            cu = np.append(np.arange(batch) * self.tokens + pad, batch * self.tokens)
            flat = np.concatenate([cu, self.lengths, pad, self.seen - self.lengths])
            tensor = upload(flat.astype(np.int32), device)
            self._device[device] = RowTensors(*tensor.split([batch + 1, batch, batch, batch]))
        return self._device[device]

    def pick(self, x: Tensor, first: int) -> Tensor:
        """The part's columns of x [B, H, columns, D] of a forward that starts at column `first`."""
        if self.columns is None:
            return x[:, :, self.start - first : self.start - first + self.tokens]
        index = self._columns_on(x.device)[:, None, :, None]
        return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))

    def put(self, out: Tensor, x: Tensor, first: int) -> None:
        """Write x [B, T, H, D] to the part's columns of out [B, columns, H, D]."""
        if self.columns is None:
            out[:, self.start - first : self.start - first + self.tokens] = x
        else:
            out.scatter_(1, self._columns_on(x.device)[:, :, None, None].expand_as(x), x)

    def _columns_on(self, device: torch.device) -> Tensor:
        assert self.columns is not None
        columns = self.columns.astype(np.int64)
        return self.once(("columns", device), lambda: upload(columns, device))

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returned for the first layer of the forward that asked for `key`."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def in_blocks(part: Part, block: int) -> list[Part]:
    """A prompt as parts that hold `block` real tokens of each row, the last one what is left.

    Padding, which a row has in front of its tokens, goes wherever a row has fewer tokens than
    others; the first part takes what all rows have.
    """
    longest, batch = int(part.lengths.max(initial=0)), len(part.lengths)
    pads, taken = np.zeros(batch, dtype=np.int64), np.zeros(batch, dtype=np.int64)
    parts: list[Part] = []
    for start in range(0, max(longest, 1), block):
        width = min(block, longest - start) + (0 if start else part.tokens - longest)
        real = np.clip(part.lengths - start, 0, block)
        column = np.arange(width)
        padding = column < (width - real)[:, None]
        rank = (part.tokens - part.lengths + taken)[:, None] + column - (width - real)[:, None]
        columns = np.where(padding, pads[:, None] + column, rank)
        pads, taken = pads + width - real, taken + real
        seen = part.seen - part.lengths + taken
        kind = "chunk" if start else part.kind
        plain = (columns == columns[:1, :1] + column).all()
        first = part.start + int(columns[0, 0])
        own, more = None if plain else columns, start + block < longest
        parts.append(Part(kind, first, width, real, seen, columns=own, more=more))
    return parts


def real_lengths(mask: Tensor | None, start: int, known: np.ndarray, tokens: int) -> np.ndarray:
    """Real tokens per row among columns start .. start+tokens-1 of a padding mask.

    mask: bool or 0/1 [B, >= start + tokens], or None (all real); known: int [B] real tokens among
    the columns before. A mask costs one wait for the device, however many tokens it covers.

    Raises:
        ValueError: another shape, real tokens that padding follows, or a mask that hides cached
            tokens (or shows padding that is not cached).
    """
    batch = len(known)
    if mask is None:
        return np.full(batch, tokens)
    if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] < start + tokens:
        raise ValueError(
            f"expected attention_mask to be a 2-D padding mask [{batch}, {start + tokens}], "
            f"got shape {tuple(mask.shape)}"
        )
    columns = mask[:, : start + tokens].bool()
    before = columns[:, :start].sum(1, keepdim=True, dtype=torch.int32)
    found = torch.cat([before, columns[:, start:].int()], 1).cpu().numpy()
    old, valid = found[:, 0], found[:, 1:].astype(bool)
    if (old != known).any():
        raise ValueError(
            f"expected attention_mask to show the {known.tolist()} tokens of each row that are "
            f"cached, got {old.tolist()}: a cached token cannot be hidden later (did a row finish "
            f"early and get padding?)"
        )
    lengths = valid.sum(1)
    if (valid != (np.arange(tokens) >= (tokens - lengths)[:, None])).any():
        raise ValueError(
            "expected left padding (zeros of attention_mask before the ones of each forward), got "
            "padding after real tokens; set tokenizer.padding_side = 'left'"
        )
    return lengths
