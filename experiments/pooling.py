"""How should votes be pooled over neighbouring keys: max, average or not at all, how wide?

    python experiments/pooling.py --data DIR --out OUT

Pooling keeps whole stretches around a key that was voted for. Its price: fewer separate places.
"""

from __future__ import annotations

from experiment import Experiment, main
from units import Arm

from sparsekv.policies import SnapKV

BUDGETS = (64, 128, 256)
POLICIES = {
    "none": SnapKV(pool="none"),
    "max 3": SnapKV(kernel=3),
    "max 7": SnapKV(kernel=7),
    "max 15": SnapKV(kernel=15),
    "avg 3": SnapKV(kernel=3, pool="avg"),
    "avg 7": SnapKV(kernel=7, pool="avg"),
    "avg 15": SnapKV(kernel=15, pool="avg"),
}

EXPERIMENT = Experiment(
    name="pooling",
    question="How should SnapKV's votes be pooled?",
    arms=tuple(Arm(label, policy, b) for label, policy in POLICIES.items() for b in BUDGETS),
    tasks=("needle-1k", "recall-1k"),
    against={label: "max 7" for label in POLICIES if label != "max 7"},
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
