"""The independent truth of the tests under its old name; see the package `reference`."""

from reference.evictor import Reference

__all__ = ["Reference"]
