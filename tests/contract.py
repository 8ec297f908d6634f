"""The fields of every policy of the zoo and their defaults, as agreed; and stand-ins made of them.

A stand-in is a plain object with those fields: enough for the reference, which is proven with it
before the library has a policy of that name.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

FIELDS: dict[str, dict[str, Any]] = {
    "knorm": {},
    "random": {"seed": 0},
    "tova": {},
    "scissorhands": {"window": 400, "recent": 10, "drop": 0.5, "group": "sum"},
    "keyformer": {
        "recent_fraction": 0.3, "tau_start": 1.0, "tau_end": 2.0, "tau_steps": 128, "seed": 0,
        "noise": "gumbel", "group": "mean",
    },
    "adakv": {
        "scorer": "snapkv", "floor": 0.2, "mode": "mix", "normalise": False, "skip": 0,
    },
    "criticalkv": {"scorer": "snapkv", "first_share": 0.5, "epsilon": 1e-4},
    "chunked": {"scorer": "snapkv", "chunk": 20},
    "expected": {
        "sinks": 4, "future": 512, "epsilon": 0.0, "covariance": True, "value_norm": True,
    },
    "keydiff": {"block": 128},
    "rkv": {"window": 8, "kernel": 7, "similarity": 0.5, "mix": 0.1, "buffer": 128},
    "duo": {"gates": None, "sparsity": 0.5, "sinks": 64, "recent": 256},
    "planned": {"scorer": "snapkv", "shares": None, "head_dim": None},
    "quest": {"dense_layers": 2},
    "kvzip": {"tokenizer": None, "chunk": 2000, "uniform": False, "sinks": 4},
    "pyramidinfer": {
        "recent": 0.2, "decay": None, "interval": 1, "sinks": 4, "distance_weight": 1.2,
        "min_context": 64, "gen_decay": 0.1, "gen_keep": 0.9, "exceed": 16,
    },
}  # fmt: skip

_BEFORE: dict[str, dict[str, Any]] = {
    "full": {},
    "streaming": {"sinks": 4, "positions": "original"},
    "h2o": {"heavy_fraction": 0.5, "group": "mean"},
    "snapkv": {"window": 32, "kernel": 7, "pool": "max", "group": "mean"},
    "pyramid": {
        "window": 8, "kernel": 7, "pool": "max", "group": "mean", "beta": 20, "rounding": "exact",
    },
}  # fmt: skip


def stand_in(name: str, **fields: Any) -> SimpleNamespace:
    """An object with the fields of that policy."""
    values = {**FIELDS, **_BEFORE}[name] | fields
    if values.get("scorer") == "snapkv":
        values["scorer"] = stand_in("snapkv")
    return SimpleNamespace(name=name, **values)
