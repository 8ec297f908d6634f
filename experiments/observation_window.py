"""How many of the last queries should vote?

    python experiments/observation_window.py --data DIR --out OUT

The window is always kept, so it costs budget; and where the question is not known, it is only the
end of the text. Published settings are 8, 16, 32 and 64.
"""

from __future__ import annotations

from experiment import Experiment, main
from units import Arm

from sparsekv.policies import SnapKV

BUDGETS = (64, 128, 256)
WINDOWS = (1, 4, 8, 16, 32, 64)

EXPERIMENT = Experiment(
    name="observation_window",
    question="How many of the last queries should vote in SnapKV?",
    arms=tuple(Arm(f"{w} rows", SnapKV(window=w), b) for w in WINDOWS for b in BUDGETS),
    tasks=("needle-1k", "recall-1k"),
    against={f"{w} rows": "32 rows" for w in WINDOWS if w != 32},
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
