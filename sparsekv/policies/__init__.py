"""Eviction policies: one file each. To add one, write its file and its line in `POLICIES`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sparsekv.policies.adakv import AdaKV
from sparsekv.policies.base import (
    Gumbel,
    HeadPlan,
    LayerPlan,
    ModelShape,
    Need,
    Phase,
    Policy,
    Selection,
    Stats,
    TopK,
)
from sparsekv.policies.budgets import resolve_budget
from sparsekv.policies.chunked import Chunked
from sparsekv.policies.criticalkv import CriticalKV
from sparsekv.policies.duo import Duo
from sparsekv.policies.expected import Expected
from sparsekv.policies.full import Full
from sparsekv.policies.h2o import H2O
from sparsekv.policies.keydiff import KeyDiff
from sparsekv.policies.keyformer import Keyformer
from sparsekv.policies.knorm import Knorm
from sparsekv.policies.kvzip import KVzip
from sparsekv.policies.layersplit import LayerSplit
from sparsekv.policies.planned import Planned
from sparsekv.policies.pyramid import Pyramid
from sparsekv.policies.pyramidinfer import PyramidInfer
from sparsekv.policies.quest import Quest
from sparsekv.policies.random import Random
from sparsekv.policies.rkv import RKV
from sparsekv.policies.scissorhands import Scissorhands
from sparsekv.policies.snapkv import SnapKV
from sparsekv.policies.streaming import Streaming
from sparsekv.policies.tova import TOVA

POLICIES: Mapping[str, type[Policy]] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            Full,
            Streaming,
            H2O,
            SnapKV,
            Pyramid,
            LayerSplit,
            TOVA,
            Scissorhands,
            Keyformer,
            KeyDiff,
            RKV,
            Quest,
            KVzip,
            PyramidInfer,
            Duo,
            Planned,
            AdaKV,
            CriticalKV,
            Chunked,
            Expected,
            Knorm,
            Random,
        )
    }
)


def get_policy(policy: str | Policy) -> Policy:
    """The policy itself, or the one of that name with its default hyper-parameters."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]()
    raise ValueError(f"expected a Policy or one of {', '.join(POLICIES)}, got {policy!r}")


__all__ = [
    "H2O",
    "POLICIES",
    "RKV",
    "TOVA",
    "AdaKV",
    "Chunked",
    "CriticalKV",
    "Duo",
    "Expected",
    "Full",
    "Gumbel",
    "HeadPlan",
    "KVzip",
    "KeyDiff",
    "Keyformer",
    "Knorm",
    "LayerPlan",
    "LayerSplit",
    "ModelShape",
    "Need",
    "Phase",
    "Planned",
    "Policy",
    "Pyramid",
    "PyramidInfer",
    "Quest",
    "Random",
    "Scissorhands",
    "Selection",
    "SnapKV",
    "Stats",
    "Streaming",
    "TopK",
    "get_policy",
    "resolve_budget",
]
