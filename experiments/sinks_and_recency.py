"""What do attention sinks and recent tokens do, apart from each other and from attention scores?

    python experiments/sinks_and_recency.py --data DIR --out OUT

Sinks: a window with 0 to 16 of the first tokens. Recency: H2O from recent tokens only to heavy
hitters only, and layersplit with more or fewer of its newest tokens protected.
"""

from __future__ import annotations

from experiment import Experiment, main
from units import Arm

from sparsekv.policies import H2O, LayerSplit, Streaming

BUDGETS = (64, 256)
SINKS, HEAVY, RECENT = (0, 1, 2, 4, 16), (0.0, 0.25, 0.5, 0.75, 1.0), (0, 8, 32)
POLICIES = {
    **{f"window, {n} sinks": Streaming(sinks=n) for n in SINKS},
    **{f"h2o, {share:.0%} heavy": H2O(heavy_fraction=share) for share in HEAVY},
    **{f"layersplit, {n} recent": LayerSplit(recent=n) for n in RECENT},
}

EXPERIMENT = Experiment(
    name="sinks_and_recency",
    question="What do sinks and recent tokens do?",
    arms=tuple(Arm(label, policy, b) for label, policy in POLICIES.items() for b in BUDGETS),
    tasks=("needle-1k", "recall-1k", "lm-prose-2k"),
    against={
        **{f"window, {n} sinks": "window, 4 sinks" for n in SINKS if n != 4},
        **{f"h2o, {share:.0%} heavy": "h2o, 50% heavy" for share in HEAVY if share != 0.5},
        **{f"layersplit, {n} recent": "layersplit, 32 recent" for n in RECENT if n != 32},
    },
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
