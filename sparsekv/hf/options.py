"""Options of `patch` that need no model to be found wrong."""

from __future__ import annotations

from sparsekv.cache.pages import check_page_size


def check_options(page_size: int, defer_eviction: bool) -> None:
    """Raise ValueError for a page size that does not exist, or a flag that is neither of two."""
    check_page_size(page_size)
    if not isinstance(defer_eviction, bool):
        raise ValueError(f"expected defer_eviction to be True or False, got {defer_eviction!r}")
