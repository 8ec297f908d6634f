"""Every kind of name leads to its builder."""

from __future__ import annotations

import pytest

from sparsekv.evaluation.lookup import find_builder
from sparsekv.evaluation.ruler import RULER, RulerTask
from sparsekv.evaluation.sets.longbench import LongBenchTask
from sparsekv.evaluation.sets.longbench_subsets import SUBSETS
from sparsekv.evaluation.sets.mmlu import MMLUTask
from sparsekv.evaluation.sets.ruler_qa import RulerQATask
from sparsekv.evaluation.tasks import TASKS


def test_names_of_every_kind():
    assert all(find_builder(name) is TASKS[name] for name in TASKS)
    assert all(find_builder(f"ruler-{name}-8k") == RulerTask(name, 8192) for name in RULER)
    for name in SUBSETS:
        assert find_builder(f"longbench-{name}") == LongBenchTask(name, None, f"longbench-{name}")
    assert find_builder("rulerqa-2-16k") == RulerQATask(2, 16_384, "rulerqa-2-16k")
    assert find_builder("mmlu-law") == MMLUTask("law")


@pytest.mark.parametrize("name", ["needle", "needle-3k", "ruler", "longbench", "", "ruler-vt"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="expected"):
        find_builder(name)
