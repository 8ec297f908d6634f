"""How to reduce the query heads of a group to one score for their KV head: mean or max?

    python experiments/group_reduction.py --data DIR --out OUT

SnapKV's code keeps one cache a query head; with one a KV head, a choice has to be made. (The sum
ranks as the mean does.) H2O sums all rows, SnapKV the last 32.
"""

from __future__ import annotations

from experiment import Experiment, main
from units import Arm

from sparsekv.policies import H2O, SnapKV

BUDGETS = (64, 128, 256)
POLICIES = {
    "snapkv, mean": SnapKV(group="mean"),
    "snapkv, max": SnapKV(group="max"),
    "h2o, mean": H2O(group="mean"),
    "h2o, max": H2O(group="max"),
}

EXPERIMENT = Experiment(
    name="group_reduction",
    question="Mean or max over the query heads of a group?",
    arms=tuple(Arm(label, policy, b) for label, policy in POLICIES.items() for b in BUDGETS),
    tasks=("needle-1k", "recall-1k"),
    against={"snapkv, max": "snapkv, mean", "h2o, max": "h2o, mean"},
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
