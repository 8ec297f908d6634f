"""What a model does with a text: massive activations, attention by head, and plans made of it."""

from sparsekv.diagnose.activations import Activations, massive
from sparsekv.diagnose.heads import HeadTable, attention

__all__ = ["Activations", "HeadTable", "attention", "massive"]
