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
from sparsekv.evaluation.wish import check_wish


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


def test_the_command_takes_names_of_every_kind():
    more = {"mode": "smoke", "samples": None, "seed": 0, "data": None, "gates": None}
    names = "needle-1k, ruler-vt-8k,longbench-trec,rulerqa-1-4k,mmlu"
    wish = check_wish("full", None, names, "both", int, feed="chunk", **more)
    assert wish.tasks == tuple(name.strip() for name in names.split(","))
    with pytest.raises(ValueError, match="expected longbench-SUBSET"):
        check_wish("full", None, "mmlu,longbench-x", "both", int, feed="chunk", **more)
