"""Quantised caches and eviction: at equal bytes, fewer tokens or fewer bits?

    python experiments/quantised_cache.py --data DIR --out OUT

The plot's axis is bytes. On a GPU before compute capability 8.9 the rows of fp8_e4m3 say that it is
refused.
"""

from __future__ import annotations

from experiment import Experiment, main
from units import Arm

from sparsekv.policies import SnapKV

BUDGETS = (64, 128, 256, 512)
DTYPES = ("int8", "int4", "fp8_e4m3", "fp8_e5m2")
EVERYTHING = 4096  # more than any prompt of these tasks: nothing is evicted

EXPERIMENT = Experiment(
    name="quantised_cache",
    question="At equal bytes: fewer tokens or fewer bits?",
    arms=tuple(
        Arm(dtype or "as computed", SnapKV(), budget, dtype)
        for dtype in (None, *DTYPES)
        for budget in (*BUDGETS, EVERYTHING)
    ),
    tasks=("needle-1k", "recall-1k", "lm-prose-2k"),
    against=dict.fromkeys(DTYPES, "as computed"),
    x="kv_bytes",
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
