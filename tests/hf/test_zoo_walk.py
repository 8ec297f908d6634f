"""Random walks of the zoo: chunks, steps, drafts and moving rows, each row as the reference's."""

from __future__ import annotations

import pytest
from test_walk import Walk, run
from zoo import EXAMPLES, NAMES, SUPPORT, example

# These two walk elsewhere: their references take a whole prompt, or passes that generate() runs.
WALKERS = [name for name in NAMES if name not in ("kvzip", "pyramidinfer")]


@pytest.mark.filterwarnings("ignore:pyramid gives all")
@pytest.mark.parametrize("seed", [200, 201, 202])
# A walk meets tokens twice, whose keys have the same norm: knorm would rank the rounding.
@pytest.mark.parametrize("name", [name for name in WALKERS if name != "knorm"])
def test_random_walk(name, seed):
    example(name)  # skips what the library does not have
    walk = Walk(seed * 31 + WALKERS.index(name), fixed=EXAMPLES[name])
    run(walk, drafts=SUPPORT[name]["drafts"] == "right")
