"""The paged KV cache of the layers that live on one device.

State is data: `block_table` int32 [L, B, HK, maxP] and `seqlens` int32 [L, B, HK] on the device,
and the same two on the host (`table`, `lens`), so that pages are planned without waiting for it.
A slot index counts inside one (layer, row, KV head); slots 0 .. seqlens-1 are in use, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsekv.cache.pages import PagePool, upload
from sparsekv.kernels.append import append_kv
from sparsekv.kernels.compact import compact_kv


@dataclass(frozen=True)
class Snapshot:
    """One layer's tables at some moment; it owns its pages until restored or dropped."""

    layer: int
    table: np.ndarray
    lens: np.ndarray


class PagedKVCache:
    """Block tables over a `PagePool`.

    Args:
        num_layers, batch, num_kv_heads: the L, B, HK of the tables.
    """

    def __init__(self, pool: PagePool, num_layers: int, batch: int, num_kv_heads: int) -> None:
        self.pool = pool
        shape = (num_layers, batch, num_kv_heads)
        self.table = np.zeros((*shape, 0), dtype=np.int32)
        self.lens = np.zeros(shape, dtype=np.int32)
        self.pages = np.zeros(shape, dtype=np.int32)  # block-table entries in use
        self.block_table = torch.zeros((*shape, 0), dtype=torch.int32, device=pool.device)
        self.seqlens = torch.zeros(shape, dtype=torch.int32, device=pool.device)

    @property
    def batch(self) -> int:
        """Rows."""
        return self.lens.shape[1]

    # ------------------------------------------------------------------ pages

    def ensure(self, layers: np.ndarray, new: np.ndarray, rewrites: np.ndarray) -> None:
        """Give every head of `layers` pages of its own for `new` more slots.

        Args:
            layers: int [l] layer ids. new: int [l, B, HK] slots about to be appended.
            rewrites: bool [l]; True if slots that exist will be written too (replacement, scores),
                so that shared pages must be copied, not only the one at the end.
        """
        size = self.pool.page_size
        lens, pages = self.lens[layers], self.pages[layers]
        need = np.maximum(-(-(lens + new) // size) - pages, 0)
        width = int((pages + need).max(initial=0))
        if width > self.table.shape[-1]:
            self._widen(width + max(4, width // 8))
        if need.any():
            self._append_pages(layers, need)
        if self.pool.has_shared:
            first = np.where(rewrites[:, None, None], 0, lens // size)
            self._unshare(layers, first)

    def unshare(self, layer: int) -> None:
        """Give a layer's heads pages of their own, before slots that exist are written."""
        if self.pool.has_shared:
            self._unshare(np.array([layer]), np.zeros_like(self.lens[:1]))

    def _widen(self, width: int) -> None:
        extra = width - self.table.shape[-1]
        self.table = np.pad(self.table, [(0, 0)] * 3 + [(0, extra)])
        self.block_table = torch.nn.functional.pad(self.block_table, (0, extra))

    def _append_pages(self, layers: np.ndarray, need: np.ndarray) -> None:
        """Append need[l, b, h] fresh pages to each table."""
        start = self.pages[layers][..., None]
        column = np.arange(self.table.shape[-1])
        new = np.zeros(self.table.shape, dtype=bool)
        new[layers] = (column >= start) & (column < start + need[..., None])
        self._set(new, self.pool.allocate(int(need.sum())))
        self.pages[layers] += need

    def _unshare(self, layers: np.ndarray, first: np.ndarray) -> None:
        """Copy every page at or after table column `first` [l, B, HK] that has another owner."""
        column = np.arange(self.table.shape[-1])
        shared = (self.pool.refcount[self.table[layers]] > 1) & (column >= first[..., None])
        shared &= column < self.pages[layers][..., None]
        old = self.table[layers][shared]
        if len(old) == 0:
            return
        # Two tables may share the same page: each gets its copy, the last keeps the original only
        # if nobody else holds it, which costs one page copy more than needed and no bookkeeping.
        new = self.pool.allocate(len(old))
        self.pool.copy(old, new)
        self.pool.release(old)
        where = np.zeros(self.table.shape, dtype=bool)
        where[layers] = shared
        self._set(where, new)

    def _set(self, where: np.ndarray, ids: np.ndarray | int) -> None:
        """table[where] = ids in their order, on the host and the device; where: bool, as table."""
        self.table[where] = ids
        flat = np.flatnonzero(where)
        if 8 * len(flat) > where.size:  # most of it: send it whole
            self.block_table.copy_(upload(self.table, self.pool.device))
            return
        pairs = np.stack([flat, self.table.reshape(-1)[flat].astype(np.int64)])
        both = upload(pairs, self.pool.device)
        self.block_table.view(-1)[both[0]] = both[1].int()

    # ------------------------------------------------------------------ slots

    def append(
        self,
        layer: int,
        k: Tensor,
        v: Tensor,
        slots: Tensor | None,
        token_positions: Tensor | None,
        *,
        index: Tensor | None = None,
        offsets: Tensor | None = None,
        token_scores: Tensor | None = None,
        count: bool = False,
    ) -> None:
        """Write tokens, see `append_kv`; the caller sets the new lengths.

        count: one token goes behind the slots of each head, and the device counts it.
        """
        pool = self.pool
        append_kv(
            k, v, pool.k_pages, pool.v_pages, pool.positions, pool.scores,
            self.block_table[layer], slots, token_positions, index=index, offsets=offsets,
            cache_seqlens=self.seqlens[layer] if count else None, token_scores=token_scores,
            k_scales=pool.k_scales, v_scales=pool.v_scales,
        )  # fmt: skip

    def set_lens(self, layer: int, device: Tensor, host: np.ndarray) -> None:
        """Record new lengths of a layer: int32 [B, HK] on the device and the same on the host."""
        self.seqlens[layer].copy_(device)
        self.lens[layer] = host

    def width(self, layer: int) -> int:
        """Block-table columns that any head of the layer uses."""
        return int(self.pages[layer].max(initial=0))

    def view(self, layer: int, name: str) -> Tensor:
        """`positions` or `scores` of a layer by slot: [B, HK, width * P]; junk beyond seqlens."""
        table = self.block_table[layer, :, :, : self.width(layer)]
        return getattr(self.pool, name)[table.long()].flatten(-2)

    def store_scores(self, layer: int, state: Tensor) -> None:
        """Write back scores obtained by `view`. state: fp32 [B, HK, width * P]."""
        table = self.block_table[layer, :, :, : self.width(layer)].long()
        # Unused entries write into the null page, which nobody reads.
        self.pool.scores[table] = state.unflatten(-1, (table.shape[-1], self.pool.page_size))

    def gather(self, layer: int, order: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of slots `order` int64 [B, HK, S] as dense tensors [B, HK, S, D]."""
        return self.pool.read(*self._places(layer, order))

    def write_keys(self, layer: int, order: Tensor, k: Tensor, chosen: Tensor) -> None:
        """Overwrite keys of slots `order` by k [B, HK, S, D] where `chosen` bool [B, HK, S, 1]."""
        self.pool.write_keys(*self._places(layer, order), k, chosen)

    def _places(self, layer: int, order: Tensor) -> tuple[Tensor, Tensor]:
        """(page, offset) of slots."""
        size = self.pool.page_size
        return self.block_table[layer].long().gather(-1, order // size), order % size

    def compact(self, layer: int, keep: Tensor, host: np.ndarray | None) -> None:
        """Keep the slots marked in `keep` bool [B, HK, S]; `trim` gives back the pages left over.

        host: int [B, HK] the kept counts if they are known without asking the device.
        """
        pool = self.pool
        new = compact_kv(
            keep, pool.k_pages, pool.v_pages, pool.positions, pool.scores,
            self.block_table[layer], self.seqlens[layer],
            k_scales=pool.k_scales, v_scales=pool.v_scales,
        )  # fmt: skip
        self.set_lens(layer, new, new.cpu().numpy() if host is None else host)

    def trim(self, layer: int) -> None:
        """Release pages of a layer that hold no slot any more."""
        needed = -(-self.lens[layer] // self.pool.page_size)
        column = np.arange(self.table.shape[-1])
        spare = (column >= needed[..., None]) & (column < self.pages[layer][..., None])
        if not spare.any():
            return
        self.pool.release(self.table[layer][spare])
        where = np.zeros(self.table.shape, dtype=bool)
        where[layer] = spare
        self._set(where, 0)
        self.pages[layer] = needed

    def shrink(self) -> None:
        """Give the memory of free pages back to the device; no snapshot may exist."""
        self.table = self.pool.shrink()[self.table]
        self.block_table.copy_(upload(self.table, self.pool.device))

    # ------------------------------------------------------------------ rows and forks

    def select_rows(self, rows: np.ndarray) -> None:
        """Make row i a fork of old row rows[i] (beam search); pages are shared, not copied."""
        table = self.table[:, rows]
        self.pool.share(table.ravel())
        self.pool.release(self.table.ravel())
        self.table, self.lens, self.pages = table, self.lens[:, rows], self.pages[:, rows]
        index = upload(rows.astype(np.int64), self.pool.device)
        self.block_table = self.block_table[:, index]
        self.seqlens = self.seqlens[:, index]

    def snapshot(self, layer: int) -> Snapshot:
        """Fork one layer; later writes copy the pages that the snapshot holds."""
        self.pool.share(self.table[layer].ravel())
        return Snapshot(layer, self.table[layer].copy(), self.lens[layer].copy())

    def drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot."""
        self.pool.release(snapshot.table.ravel())

    def restore(self, snapshot: Snapshot) -> None:
        """Put a layer back to `snapshot`, which is used up."""
        layer, pad = snapshot.layer, self.table.shape[-1] - snapshot.table.shape[-1]
        self.pool.release(self.table[layer].ravel())
        self.table[layer] = np.pad(snapshot.table, [(0, 0), (0, 0), (0, pad)])
        self.pages[layer] = (self.table[layer] != 0).sum(-1)
        device = self.pool.device
        self.block_table[layer] = upload(self.table[layer], device)
        self.set_lens(layer, upload(snapshot.lens, device), snapshot.lens)

    def free(self) -> None:
        """Give every page back."""
        self.pool.release(self.table.ravel())
        self.table[:], self.lens[:], self.pages[:] = 0, 0, 0
        self.block_table.zero_()
        self.seqlens.zero_()

    def validate(self, snapshots: tuple[Snapshot, ...] = ()) -> None:
        """Assert the invariants; for tests (it waits for the device)."""
        pool, size = self.pool, self.pool.page_size
        assert (self.block_table.cpu().numpy() == self.table).all(), "tables differ"
        assert (self.seqlens.cpu().numpy() == self.lens).all(), "lengths differ"
        assert (self.lens <= self.pages * size).all(), "more slots than pages"
        column = np.arange(self.table.shape[-1])
        assert ((self.table != 0) == (column < self.pages[..., None])).all(), "holes in a table"
        owners = np.zeros_like(pool.refcount)
        for table in (self.table, *(snapshot.table for snapshot in snapshots)):
            np.add.at(owners, table[table != 0], 1)
        owners[0] = 1
        assert (owners == pool.refcount).all(), "refcounts differ from the owners found"
        free = np.sort(pool._free)
        assert (free == np.nonzero(owners == 0)[0]).all(), "free list is not what nobody owns"
