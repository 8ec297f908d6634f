"""What a cache holds: kept tokens per layer and KV head, bytes that exist, pages."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sparsekv.state import SparseState

_MIB = 1 << 20


@dataclass(frozen=True)
class Kept:
    """Tokens kept per KV head: over the heads and rows of a layer, or over everything."""

    min: int
    mean: float
    max: int


@dataclass(frozen=True)
class CacheReport:
    """Figures of one cache.

    tokens_seen: real tokens fed so far, per row (padding not counted).
    kv_dtype: how K and V are quantised, or None.
    kv_bytes: bytes of the K and V tensors that exist, measured; free pages and scales included.
    dense_bytes: what a dense cache (sliding layers cut to their window) holds for the same input.
    metadata_bytes: positions, scores, block tables, lengths and key bounds of pages that exist
        beside K and V.
    note: what the policy says about these figures, or None.
    """

    policy: str
    tokens_seen: tuple[int, ...]
    kept: Kept
    layers: tuple[Kept, ...]
    kv_dtype: str | None
    kv_bytes: int
    dense_bytes: int
    metadata_bytes: int
    pages_used: int
    pages_free: int
    page_size: int
    note: str | None = None

    @property
    def ratio(self) -> float:
        """kv_bytes / dense_bytes."""
        return self.kv_bytes / self.dense_bytes if self.dense_bytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values, ready for JSON."""
        plain = asdict(self)
        plain["tokens_seen"] = list(self.tokens_seen)
        plain["layers"] = [asdict(layer) for layer in self.layers]
        return {**plain, "ratio": self.ratio}

    def __str__(self) -> str:
        form = f" in {self.kv_dtype} with its scales" if self.kv_dtype else ""
        lines = [
            f"policy {self.policy}: {', '.join(map(str, self.tokens_seen))} tokens seen",
            f"kept per layer and KV head: {self.kept.min} min, {self.kept.mean:.1f} mean, "
            f"{self.kept.max} max",
            f"KV {self.kv_bytes / _MIB:.2f} MiB held{form}, "
            f"dense {self.dense_bytes / _MIB:.2f} MiB, "
            f"ratio {self.ratio:.3f} (beside it {self.metadata_bytes / _MIB:.2f} MiB of tables)",
            f"pages of {self.page_size} slots: {self.pages_used} used, {self.pages_free} free",
        ]
        lines += [self.note] if self.note else []
        lines += [
            f"  layer {i:3d}: {layer.min} / {layer.mean:.1f} / {layer.max}"
            for i, layer in enumerate(self.layers)
        ]
        return "\n".join(lines)


def make_report(state: SparseState) -> CacheReport:
    """Measure a cache; nothing in it is computed from budgets."""
    stores = state.stores
    lens = [store.lens[local] for store, local in (state.store(i) for i in _layers(state))]
    tables = [tensor for store in stores for tensor in (store.block_table, store.seqlens)]
    beside = (x for store in stores for x in store.pool.page_tensors.items())
    tables += [tensor for name, tensor in beside if name[0] not in "kv"]
    everything = np.concatenate([n.ravel() for n in lens]) if lens else np.zeros(0, dtype=np.int32)
    return CacheReport(
        policy=state.policy.name,
        tokens_seen=tuple(int(n) for n in state.tokens),
        kept=_kept(everything),
        layers=tuple(_kept(n) for n in lens),
        kv_dtype=state.kv_dtype,
        kv_bytes=sum(store.pool.kv_bytes for store in stores),
        dense_bytes=sum(_dense_bytes(state, layer) for layer in _layers(state)),
        metadata_bytes=sum(tensor.nbytes for tensor in tables),
        pages_used=sum(store.pool.pages_used for store in stores),
        pages_free=sum(store.pool.pages_free for store in stores),
        page_size=state.page_size,
        note=state.policy.note,
    )


def _layers(state: SparseState) -> range:
    return range(len(state.layers) if state.stores else 0)


def _kept(lens: np.ndarray) -> Kept:
    if not lens.size:
        return Kept(0, 0.0, 0)
    return Kept(int(lens.min()), float(lens.mean()), int(lens.max()))


def _dense_bytes(state: SparseState, layer: int) -> int:
    """Bytes a transformers DynamicCache layer holds for the same columns."""
    store, _ = state.store(layer)
    window = state.layers[layer].window
    columns = state.seen[layer] if window is None else min(state.seen[layer], window - 1)
    pool = store.pool
    return store.batch * store.lens.shape[2] * columns * 2 * pool.head_dim * pool.dtype.itemsize
