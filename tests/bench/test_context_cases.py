"""Time a token by context: which tokens it is the time of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsekv.bench import context_cases
from sparsekv.bench.case import Context
from sparsekv.bench.whole import Whole


@pytest.mark.parametrize("contender", ["ours", "ours_snapkv_24", "hf_dynamic"])
def test_tokens_that_capture_the_step_do_not_count(
    monkeypatch: pytest.MonkeyPatch, contender: str
) -> None:
    """The first interval of a generation is 100 ms longer than its steps are."""

    def measured(model: Any, ids: torch.Tensor, marks: tuple[int, ...]) -> Whole:
        assert marks[0] == 1
        later = tuple(float(interval) for interval in range(1, len(marks) - 1))
        return Whole(5.0, (100.0, *later), 1.0, 48.0, None, ())

    monkeypatch.setattr(context_cases, "measured", measured)
    context = Context(torch.device("cpu"), tiny=True, rounds=1)
    case = context_cases.context_cases(True)[0]
    factories = {"ours": case.ours, **case.peers}
    got = factories[contender](case.inputs(context), context)()
    assert got.values == (1.0, 2.0)
