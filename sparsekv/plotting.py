"""matplotlib, an optional dependency, drawing to files."""

from __future__ import annotations

from typing import Any


def pyplot(purpose: str) -> Any:
    """matplotlib.pyplot. purpose: what is missing without it, for the error.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            f"expected matplotlib for {purpose} (pip install 'sparsekv[plot]'), got {error}"
        ) from error
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt
