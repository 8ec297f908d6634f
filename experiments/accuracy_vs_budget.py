"""Accuracy against budget for every policy, with the question known and not known.

    python experiments/accuracy_vs_budget.py --data DIR --out OUT

The full suite of tasks is `sparsekv eval --full`; this is the curve on two of them, over more
budgets. A policy that cannot reach a budget (pyramidinfer: its tail alone is a fifth of a prompt)
runs at the smallest that it can. quest reads less and frees nothing: its point lies at the dense
cache. The gates of duo are measured on the texts; the plan of planned is of SmolLM2-135M.
"""

from __future__ import annotations

from pathlib import Path

from experiment import Experiment, main
from units import Arm

from sparsekv.policies import POLICIES, Full, Planned, Policy, Random

BUDGETS = (32, 64, 128, 256, 512)
PLAN = Path(__file__).resolve().parent / "plans" / "smollm2.json"
NAMES: dict[str, str | Policy] = {name: name for name in POLICIES if name != Full.name}
NAMES[Planned.name] = Planned.load(PLAN)

EXPERIMENT = Experiment(
    name="accuracy_vs_budget",
    question="How does accuracy fall with the budget?",
    arms=tuple(Arm(name, policy, b) for name, policy in NAMES.items() for b in BUDGETS),
    tasks=("needle-1k", "recall-1k"),
    against={name: Random.name for name in NAMES if name != Random.name},
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
