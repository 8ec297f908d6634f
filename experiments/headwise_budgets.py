"""Do heads that may take from one another's budget keep more of what matters?

    python experiments/headwise_budgets.py --data DIR --out OUT

The same scores, once with an equal budget for each head, once shared within a layer by AdaKV, with
more or less of the budget guaranteed to every head. Around Expected Attention, too, whose authors
report their results with it.
"""

from __future__ import annotations

from experiment import Experiment, main
from units import Arm

from sparsekv.policies import AdaKV, CriticalKV, Expected, SnapKV

BUDGETS = (64, 128, 256)
POLICIES = {
    "snapkv": SnapKV(),
    "ada-snapkv, floor 0": AdaKV(SnapKV(), floor=0.0),
    "ada-snapkv, floor 0.2": AdaKV(SnapKV(), floor=0.2),
    "ada-snapkv, floor 0.5": AdaKV(SnapKV(), floor=0.5),
    "expected": Expected(),
    "ada-expected, floor 0.2": AdaKV(Expected(), floor=0.2),
    "critical-snapkv": CriticalKV(SnapKV()),
    "critical-ada-snapkv": CriticalKV(AdaKV(SnapKV())),
}

EXPERIMENT = Experiment(
    name="headwise_budgets",
    question="Do budgets by head beat equal budgets?",
    arms=tuple(Arm(label, policy, b) for label, policy in POLICIES.items() for b in BUDGETS),
    tasks=("needle-1k", "recall-1k"),
    against={
        "ada-snapkv, floor 0": "snapkv",
        "ada-snapkv, floor 0.2": "snapkv",
        "ada-snapkv, floor 0.5": "snapkv",
        "ada-expected, floor 0.2": "expected",
        "critical-snapkv": "snapkv",
        "critical-ada-snapkv": "ada-snapkv, floor 0.2",
    },
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
