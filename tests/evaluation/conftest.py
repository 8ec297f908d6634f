"""Fixtures of the evaluation's tests."""

from eval_rig import data, folder, subject  # noqa: F401
