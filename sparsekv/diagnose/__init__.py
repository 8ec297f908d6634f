"""What a model does with a text: massive activations, attention by head, and plans made of it."""

from sparsekv.diagnose.activations import Activations, massive
from sparsekv.diagnose.heads import HeadTable, attention
from sparsekv.diagnose.planning import MeasuredPlan, default_plan, make_plan, write_plan

__all__ = [
    "Activations",
    "HeadTable",
    "MeasuredPlan",
    "attention",
    "default_plan",
    "make_plan",
    "massive",
    "write_plan",
]
