"""A vLLM worker extension that says how much memory its KV cache takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

NAME = f"{__name__}.KVMemory"


class KVMemory:
    """Mixed into vLLM's worker by `worker_extension_cls`; it changes nothing."""

    def sparsekv_kv_bytes(self) -> int:
        """Bytes of all KV tensors of this rank; what layers share counts once."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        storages = {t.untyped_storage().data_ptr(): t for t in _tensors(runner.kv_caches)}
        return sum(t.untyped_storage().nbytes() for t in storages.values())


def _tensors(caches: Any) -> Iterator[Tensor]:
    """Of lists of tensors, lists of lists and so on."""
    if isinstance(caches, Tensor):
        yield caches
    elif isinstance(caches, list | tuple):
        for one in caches:
            yield from _tensors(one)
