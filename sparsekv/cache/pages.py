"""The page pool: K/V pages of one head dim on one device, with a free list and refcounts.

A page holds `page_size` slots of ONE KV head of ONE layer of ONE row, so any per-layer, per-head
budget frees real memory. Beside K and V every slot carries the position of its token and a score,
and a scale of each where K and V are quantised (`kernels/_quant.py`).
Page 0 is the null page: unused block-table entries point at it, and nobody ever owns it.
Ownership is kept on the host; nothing here waits for the device.
"""

from __future__ import annotations

from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from sparsekv.kernels._quant import dequantise, kv_format, quantise, raw, stored_width

# Growing adds at least this fraction of the pool, so that copies stay rare and waste stays small.
_GROWTH = 1 / 32


def check_page_size(page_size: int) -> None:
    """Raise ValueError unless pages can have so many slots."""
    if not isinstance(page_size, Integral) or page_size not in (16, 32, 64):
        raise ValueError(f"expected page_size to be 16, 32 or 64, got {page_size!r}")


class PagePool:
    """Pages [N, P, D] of keys and values, positions int32 [N, P] and scores fp32 [N, P].

    Args:
        dtype: what keys and values come in and, if they are quantised, come out as.
        page_size: slots a page, one of 16, 32, 64.
        kv_dtype: None, or a name of `KV_FORMATS`: pages are of that format ([N, P, D/2] for int4)
            and have k_scales and v_scales, fp32 [N, P].
        bounds: keep page_min and page_max [N, D] in `dtype`, the smallest and largest key of a page
            by channel (`kernels/pages.py`).

    Raises:
        ValueError: another page size, or a kv_dtype that is unknown or that head_dim or the device
            cannot serve.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        head_dim: int,
        page_size: int = 16,
        kv_dtype: str | None = None,
        bounds: bool = False,
    ) -> None:
        check_page_size(page_size)
        self.device, self.dtype = device, dtype
        self.head_dim, self.page_size = head_dim, page_size
        self.form = form = None if kv_dtype is None else kv_format(kv_dtype, head_dim, device)
        shape, stored = (1, page_size, stored_width(form, head_dim)), form.dtype if form else dtype
        self.k_pages = torch.empty(shape, dtype=stored, device=device)
        self.v_pages = torch.empty(shape, dtype=stored, device=device)
        self.k_scales = torch.ones(shape[:2], device=device) if form else None
        self.v_scales = torch.ones(shape[:2], device=device) if form else None
        self.positions = torch.zeros(1, page_size, dtype=torch.int32, device=device)
        self.scores = torch.zeros(1, page_size, dtype=torch.float32, device=device)
        self.page_min = torch.zeros(1, head_dim, dtype=dtype, device=device) if bounds else None
        self.page_max = torch.zeros(1, head_dim, dtype=dtype, device=device) if bounds else None
        self.refcount = np.ones(1, dtype=np.int32)  # the null page is never free
        self._free = np.zeros(0, dtype=np.int32)  # a stack: the last is the next to go
        self.has_shared = False

    @property
    def slot_tensors(self) -> dict[str, Tensor]:
        """Every tensor that has a row a slot, by attribute name."""
        names = ["k_pages", "v_pages", "positions", "scores"]
        names += ["k_scales", "v_scales"] if self.form else []
        return {name: getattr(self, name) for name in names}

    @property
    def page_tensors(self) -> dict[str, Tensor]:
        """Every tensor that has a row a page, by attribute name: those of slots, and the bounds."""
        bounds = {} if self.page_min is None else {"page_min": self.page_min}
        bounds |= {} if self.page_max is None else {"page_max": self.page_max}
        return self.slot_tensors | bounds

    @property
    def num_pages(self) -> int:
        """Pages that exist, the null page not counted."""
        return len(self.refcount) - 1

    @property
    def pages_free(self) -> int:
        """Pages that exist and are owned by nobody."""
        return len(self._free)

    @property
    def pages_used(self) -> int:
        """Pages that at least one block table points at."""
        return self.num_pages - len(self._free)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that exist, with their scales, free pages and the null page."""
        return sum(x.nbytes for name, x in self.slot_tensors.items() if name[0] in "kv")

    def reserve(self, count: int) -> None:
        """Make sure that `count` pages are free, growing the tensors if need be."""
        missing = count - len(self._free)
        if missing <= 0:
            return
        # A new pool is sized exactly: the caller has planned all layers.
        extra = missing if self.num_pages == 0 else max(missing, int(self.num_pages * _GROWTH))
        old = len(self.refcount)
        # One after the other, so that at most one tensor exists twice.
        for name in self.page_tensors:
            setattr(self, name, _grown(getattr(self, name), old + extra))
        self.refcount = np.concatenate([self.refcount, np.zeros(extra, dtype=np.int32)])
        fresh = np.arange(old + extra - 1, old - 1, -1, dtype=np.int32)
        self._free = np.concatenate([self._free, fresh])

    def allocate(self, count: int) -> np.ndarray:
        """Take `count` pages; returns their ids, int32 [count], each with refcount 1."""
        self.reserve(count)
        left = len(self._free) - count
        ids, self._free = self._free[left:][::-1].copy(), self._free[:left]
        self.refcount[ids] = 1
        return ids

    def share(self, ids: np.ndarray) -> None:
        """Add one owner to each page in `ids` (repeats count); null pages are ignored."""
        ids = ids[ids != 0]
        np.add.at(self.refcount, ids, 1)
        self.has_shared = self.has_shared or bool((self.refcount[ids] > 1).any())

    def release(self, ids: np.ndarray) -> None:
        """Drop one owner of each page in `ids`; pages without an owner become free."""
        ids = ids[ids != 0]
        np.subtract.at(self.refcount, ids, 1)
        unique = np.unique(ids)
        assert (self.refcount[unique] >= 0).all(), "a page was released more often than owned"
        self._free = np.concatenate([self._free, unique[self.refcount[unique] == 0]])

    def shrink(self) -> np.ndarray:
        """Give the memory of free pages back. Returns the new id of every old page, int32 [N]."""
        used = np.flatnonzero(self.refcount)
        index = upload(used, self.device)
        # One after the other, so that at most one tensor exists twice.
        for name, pages in self.page_tensors.items():
            setattr(self, name, raw(pages)[index].view(pages.dtype))
        renamed = np.zeros(len(self.refcount), dtype=np.int32)
        renamed[used] = np.arange(len(used), dtype=np.int32)
        self.refcount, self._free = self.refcount[used], self._free[:0]
        return renamed

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy whole pages `source[i]` -> `target[i]` (copy-on-write)."""
        pair = upload(np.stack([source, target]).astype(np.int64), self.device)
        for pages in map(raw, self.page_tensors.values()):
            pages[pair[1]] = pages[pair[0]]

    def read(self, page: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of slots, [..., D] in `dtype`. page, offset: int64 [...]."""
        at = page, offset
        if self.k_scales is None or self.v_scales is None:
            return self.k_pages[at], self.v_pages[at]
        k, v = (raw(pages)[at].view(pages.dtype) for pages in (self.k_pages, self.v_pages))
        scales = self.k_scales[at], self.v_scales[at]
        return dequantise(k, scales[0], self.dtype), dequantise(v, scales[1], self.dtype)

    def write_keys(self, page: Tensor, offset: Tensor, k: Tensor, chosen: Tensor) -> None:
        """Overwrite the keys of slots by k [..., D] where `chosen` bool [..., 1] says so."""
        at = page, offset
        if self.form is None or self.k_scales is None:
            self.k_pages[at] = torch.where(chosen, k, self.k_pages[at])
            return
        q, scale = quantise(k, self.form)
        pages = raw(self.k_pages)
        pages[at] = torch.where(chosen, raw(q), pages[at])
        self.k_scales[at] = torch.where(chosen[..., 0], scale, self.k_scales[at])


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` on `device`; the host does not wait, for the driver copies pageable memory aside."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def _grown(tensor: Tensor, pages: int) -> Tensor:
    """`tensor` with its first axis extended to `pages`; the new part is not initialised."""
    new = tensor.new_empty(pages, *tensor.shape[1:])
    new[: tensor.shape[0]] = tensor
    return new
