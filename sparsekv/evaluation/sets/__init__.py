"""Published data sets as tasks: LongBench, RULER's questions, MMLU. They need `datasets`.

`set_builder("longbench-hotpotqa-8k")` knows a task by how its name begins. Data sets are read from
the data folder where it has one (`longbench/`, `rulerqa/`, `mmlu/`), else from the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sparsekv.evaluation.example import Builder
from sparsekv.evaluation.sets.longbench import longbench_builder
from sparsekv.evaluation.sets.mmlu import mmlu_builder
from sparsekv.evaluation.sets.ruler_qa import ruler_qa_builder

SETS: Mapping[str, Callable[[str], Builder]] = {
    "longbench": longbench_builder,
    "rulerqa": ruler_qa_builder,
    "mmlu": mmlu_builder,
}


def set_builder(name: str) -> Builder:
    """The builder of a task of these sets.

    Raises:
        ValueError: no such set, or no such task in it.
    """
    head = name.split("-")[0]
    if head not in SETS:
        raise ValueError(f"expected a task of {', '.join(SETS)}, got {name!r}")
    return SETS[head](name)
