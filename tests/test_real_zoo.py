"""64 steps of real text: every other policy of the zoo; see `real_zoo`."""

from __future__ import annotations

import pytest
from real_zoo import MARKS, check_64_steps, smollm
from zoo import NAMES

pytestmark = MARKS
__all__ = ["smollm"]  # the fixture


@pytest.mark.parametrize("name", NAMES[::2])
def test_64_steps_of_real_text(smollm, name):
    check_64_steps(smollm, name)
