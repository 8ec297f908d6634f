"""The tasks by name, and how many contexts of each the smoke and the full mode take."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from sparsekv.evaluation.example import Builder
from sparsekv.evaluation.tasks.arc import arc_easy
from sparsekv.evaluation.tasks.icl import icl
from sparsekv.evaluation.tasks.lm import lm
from sparsekv.evaluation.tasks.needle import needle
from sparsekv.evaluation.tasks.passkey import passkey
from sparsekv.evaluation.tasks.recall import recall
from sparsekv.evaluation.tasks.xquad import xquad

TASKS: Mapping[str, Builder] = MappingProxyType(
    {
        "needle-1k": partial(needle, tokens=1024, keys=8),
        "needle-2k": partial(needle, tokens=2048, keys=4),
        "needle-4k": partial(needle, tokens=4096, keys=4),
        "passkey-1k": partial(passkey, tokens=1024),
        "passkey-4k": partial(passkey, tokens=4096),
        "recall-1k": partial(recall, tokens=1024),
        "recall-4k": partial(recall, tokens=4096),
        "recall-code-2k": partial(recall, tokens=2048, code=True),
        "xquad-1k": partial(xquad, tokens=1024),
        "icl-1k": partial(icl, tokens=1024),
        "lm-prose-2k": partial(lm, tokens=2048),
        "lm-prose-4k": partial(lm, tokens=4096),
        "lm-code-2k": partial(lm, tokens=2048, code=True),
        "lm-code-4k": partial(lm, tokens=4096, code=True),
        "arc-easy": arc_easy,
    }
)
# Contexts a task. A context of needle-1k has 8 questions, of arc-easy 25.
SMOKE: Mapping[str, int] = MappingProxyType(
    {
        "needle-1k": 4,
        "needle-2k": 2,
        "passkey-1k": 8,
        "recall-1k": 2,
        "xquad-1k": 2,
        "icl-1k": 2,
        "lm-prose-2k": 4,
        "lm-code-2k": 4,
        "arc-easy": 1,
    }
)
FULL: Mapping[str, int] = MappingProxyType(
    {
        "needle-1k": 50,
        "needle-2k": 100,
        "needle-4k": 100,
        "passkey-1k": 200,
        "passkey-4k": 200,
        "recall-1k": 50,
        "recall-4k": 50,
        "recall-code-2k": 50,
        "xquad-1k": 100,
        "icl-1k": 60,
        "lm-prose-2k": 100,
        "lm-prose-4k": 100,
        "lm-code-2k": 100,
        "lm-code-4k": 100,
        "arc-easy": 93,
    }
)
