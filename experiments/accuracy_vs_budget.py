"""Accuracy against budget for every policy, with the question known and not known.

    python experiments/accuracy_vs_budget.py --data DIR --out OUT

The full suite of tasks is `sparsekv eval --full`; this is the curve on two of them, over more
budgets. A policy that cannot reach a budget (pyramidinfer: its tail alone is a fifth of a prompt)
has a row that says so. quest reads less and frees nothing: its point lies at the dense cache.
"""

from __future__ import annotations

from experiment import Experiment, main
from units import Arm

from sparsekv.policies import POLICIES, Full, Random

BUDGETS = (32, 64, 128, 256, 512)
NAMES = tuple(name for name in POLICIES if name != Full.name)

EXPERIMENT = Experiment(
    name="accuracy_vs_budget",
    question="How does accuracy fall with the budget?",
    arms=tuple(Arm(name, name, budget) for name in NAMES for budget in BUDGETS),
    tasks=("needle-1k", "recall-1k"),
    against={name: Random.name for name in NAMES if name != Random.name},
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
