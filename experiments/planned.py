"""Does a measured plan beat layersplit and the pyramid at equal bytes?

    python experiments/planned.py --data DIR --out OUT

The same scores everywhere (32 voting rows, max pooling over 7 keys), the same number of tokens on
average, given to layers and heads in different ways: equally, falling over depth (the pyramid), in
full to the first three layers or the first one and equally to the others (layersplit), by each
prompt's own scores within a layer (AdaKV), or by a plan that was measured on Python's help texts,
which no task uses: by what leaving out costs a head's output, the same of whole layers, or by the
attention mass that is left out:

    sparsekv plan --out experiments/plans/smollm2.json
    sparsekv plan --per layer --out experiments/plans/smollm2-by-layer.json
    sparsekv plan --measure mass --goes-on --out experiments/plans/smollm2-by-mass.json

layersplit cannot pay for three full layers from small budgets; its rows then say so. Plans are of
SmolLM2-135M: with another --model their rows are refused until a plan of it stands there.
"""

from __future__ import annotations

from pathlib import Path

from experiment import Experiment, main
from units import Arm

from sparsekv.policies import AdaKV, LayerSplit, Planned, Pyramid, SnapKV

PLANS = Path(__file__).resolve().parent / "plans"
BUDGETS = (64, 128, 256)


def shared(full_layers: int) -> LayerSplit:
    """layersplit with the others' scores, whose budget is the average, full layers included."""
    return LayerSplit(full_layers, window_rows=32, pool="max", kernel=7, budget_is="average")


POLICIES = {
    "uniform": SnapKV(),
    "pyramid": Pyramid(window=32),
    "layersplit, 3 full layers": shared(3),
    "layersplit, 1 full layer": shared(1),
    "adakv": AdaKV(SnapKV()),
    "planned": Planned.load(PLANS / "smollm2.json"),
    "planned by layer": Planned.load(PLANS / "smollm2-by-layer.json"),
    "planned by mass": Planned.load(PLANS / "smollm2-by-mass.json"),
}

EXPERIMENT = Experiment(
    name="planned",
    question="Does a measured plan beat layersplit and the pyramid at equal bytes?",
    arms=tuple(Arm(label, policy, b) for label, policy in POLICIES.items() for b in BUDGETS),
    tasks=("needle-1k", "passkey-1k", "recall-1k", "lm-prose-2k"),
    against={label: "planned" for label in POLICIES if label != "planned"},
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
