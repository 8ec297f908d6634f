"""sparsekv: KV-cache sparsity for LLM inference.

    model = sparsekv.patch(model, policy="pyramid", budget=512)
    out = model.generate(**inputs, return_dict_in_generate=True)
    print(out.past_key_values.report())

Dimension letters, fixed for the whole package:
B rows (batch), T query tokens, S cached slots, HQ / HK query / KV heads, G = HQ / HK,
D head_dim, P page_size, N pages, L layers, W observation window.
"""

from sparsekv import policies
from sparsekv.hf.cache import SparseCache
from sparsekv.hf.calibrate import calibrate_duo
from sparsekv.hf.document import Document
from sparsekv.hf.extra_passes import compress
from sparsekv.hf.patch import new_cache, patch, unpatch
from sparsekv.policies import POLICIES
from sparsekv.report import CacheReport

__version__ = "0.1.0"

__all__ = [
    "POLICIES",
    "CacheReport",
    "Document",
    "SparseCache",
    "calibrate_duo",
    "compress",
    "new_cache",
    "patch",
    "policies",
    "unpatch",
]
