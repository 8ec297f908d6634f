"""Does a pyramid of budgets help at equal memory?

    python experiments/pyramid_vs_uniform.py --data DIR --out OUT

The same scores (PyramidKV's: 8 voting rows, max pooling over 7 keys), the same number of tokens on
average, given to the layers in different ways: equally, falling over depth (PyramidKV), rising over
depth (the control: is it the shape or the variety?), or in full to the first layers and equally to
the others (layersplit). The released rounding spends more than its budget, so it is compared with
equal layers that hold the tokens that it really holds. layersplit cannot pay for full layers from
small budgets; its rows then say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from experiment import Experiment, main
from units import Arm

from sparsekv.policies import LayerPlan, LayerSplit, ModelShape, Pyramid, SnapKV

BUDGETS = (64, 128, 256, 512)


@dataclass(frozen=True)
class Rising(Pyramid):
    """The pyramid upside down."""

    name: ClassVar[str] = "rising"

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        return super().plan(shape, tokens, budget)[::-1]


@dataclass(frozen=True)
class AsOfficial(SnapKV):
    """Equal layers with as many tokens as the pyramid's official rounding spends."""

    window: int = 8

    name: ClassVar[str] = "as_official"

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        official = Pyramid(rounding="official").plan(shape, tokens, budget)
        spent = sum(min(layer.budget or tokens, tokens) for layer in official)
        return super().plan(shape, tokens, spent // shape.num_layers)


def shared(full_layers: int) -> LayerSplit:
    """layersplit with the scores of the others; full layers count in its budget."""
    return LayerSplit(
        full_layers, window_rows=8, recent=8, pool="max", kernel=7, budget_is="average"
    )


POLICIES = {
    "uniform": SnapKV.longbench(),
    "pyramid": Pyramid(),
    "pyramid, mild (beta 2)": Pyramid(beta=2),
    "pyramid, official rounding": Pyramid(rounding="official"),
    "uniform, official's tokens": AsOfficial(),
    "rising": Rising(),
    "layersplit, 3 full layers": shared(3),
    "layersplit, 1 full layer": shared(1),
}

EXPERIMENT = Experiment(
    name="pyramid_vs_uniform",
    question="Does a pyramid of budgets help at equal memory?",
    arms=tuple(Arm(label, policy, b) for label, policy in POLICIES.items() for b in BUDGETS),
    tasks=("needle-1k", "passkey-1k", "recall-1k", "xquad-1k"),
    against={
        **{label: "uniform" for label in POLICIES if not label.startswith("uniform")},
        "pyramid, official rounding": "uniform, official's tokens",
    },
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
