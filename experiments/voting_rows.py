"""The alpha of layersplit: do 256 voting rows beat SnapKV's 32 and PyramidKV's 8?

    python experiments/voting_rows.py --data DIR --out OUT

The write-up that layersplit follows states 256 and gives no comparison. The newest tokens that it
protects depend on alpha, so they are the same here (8), lest more than one thing changes.
"""

from __future__ import annotations

from experiment import Experiment, main
from units import Arm

from sparsekv.policies import LayerSplit

BUDGETS = (64, 128, 256)
ROWS = (8, 32, 256)

EXPERIMENT = Experiment(
    name="voting_rows",
    question="How many rows should vote in layersplit (alpha)?",
    arms=tuple(
        Arm(f"alpha {rows}", LayerSplit(window_rows=rows, recent=8), budget)
        for rows in ROWS
        for budget in BUDGETS
    ),
    tasks=("needle-1k", "recall-1k", "lm-prose-2k"),
    against={f"alpha {rows}": "alpha 256" for rows in ROWS if rows != 256},
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
