"""From the name of a task to its builder: our own tasks, RULER's, published data sets."""

from __future__ import annotations

from sparsekv.evaluation.example import Builder
from sparsekv.evaluation.ruler import PREFIX, RULER, ruler_builder
from sparsekv.evaluation.sets import SETS, set_builder
from sparsekv.evaluation.tasks import TASKS


def find_builder(name: str) -> Builder:
    """The builder of "needle-1k", "ruler-niah-single-1-4k", "longbench-hotpotqa-8k", "mmlu", ...

    Raises:
        ValueError: no such task.
    """
    if name in TASKS:
        return TASKS[name]
    if name.startswith(PREFIX):
        return ruler_builder(name)
    if name.split("-")[0] in SETS:
        return set_builder(name)
    raise ValueError(
        f"expected a task of {', '.join(TASKS)}, or a name as ruler-{next(iter(RULER))}-4k, "
        f"longbench-hotpotqa, rulerqa-1-4k, mmlu, got {name!r}"
    )
