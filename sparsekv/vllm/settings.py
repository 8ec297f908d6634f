"""What a user asks for: `additional_config={"sparsekv": {"policy": ..., "budget": ...}}`.

policy        a name in DEFAULTS; "full" or no entry at all: vLLM as it is
budget        tokens kept per KV head in each sparse layer, pinned and recent together; "pyramid":
              on average over the sparse layers
full_layers   the first layers, which keep everything
prefill       "dense": a prompt is attended in full, then cut; "chunked": cut after each chunk of it
recent        of the budget, the newest tokens that are always kept; None: the policy's choice
options       hyper-parameters of the policy, as in `sparsekv policies`; "pyramid": tiers, too
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparsekv.policies import H2O, POLICIES, TOVA, LayerSplit, Policy, Pyramid, SnapKV, Streaming
from sparsekv.policies.base import positive
from sparsekv.policies.budgets import exact
from sparsekv.vllm.layout import Layout
from sparsekv.vllm.tiers import tier_blocks

KEY = "sparsekv"
FULL = "full"
DENSE_PREFILL, CHUNKED_PREFILL = "dense", "chunked"
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "streaming": {"sinks": 4},
    "snapkv": {},
    "pyramid": {},
    # 256 rows of queries, its default elsewhere, would take half as much memory as 1024 tokens.
    "layersplit": {"window_rows": 32},
    "tova": {},
    "h2o": {},
}
_TIERS = "tiers"  # an option of pyramid's that only this plugin has


@dataclass(frozen=True)
class Settings:
    """The user's choice, checked; `method` is the policy itself."""

    policy: str
    budget: int
    full_layers: int = 3
    recent: int | None = None
    prefill: str = DENSE_PREFILL
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str) or self.policy not in DEFAULTS:
            raise ValueError(
                f"expected policy to be one of {', '.join(DEFAULTS)}, got {self.policy!r}"
            )
        if not isinstance(self.options, Mapping):
            raise ValueError(f"expected options to be a mapping, got {self.options!r}")
        positive("budget", self.budget)
        positive("full_layers", self.full_layers, at_least=0)
        if self.recent is not None:
            positive("recent", self.recent)
        if self.prefill not in (DENSE_PREFILL, CHUNKED_PREFILL):
            raise ValueError(
                f"expected prefill to be {DENSE_PREFILL} or {CHUNKED_PREFILL}, got {self.prefill!r}"
            )
        self._check_method()

    @property
    def method(self) -> Policy:
        """The policy with the user's hyper-parameters."""
        known = {f.name for f in dataclasses.fields(POLICIES[self.policy])}
        more = {_TIERS} if self.policy == "pyramid" else set()
        if unknown := sorted(set(self.options) - known - more):
            known |= more
            raise ValueError(f"expected options of {self.policy} in {sorted(known)}, got {unknown}")
        own = {name: value for name, value in self.options.items() if name in known}
        return POLICIES[self.policy](**{**DEFAULTS[self.policy], **own})

    @property
    def tiers(self) -> int:
        """Parts of the sparse layers, lowest first, that differ in how much they pin."""
        return self.options.get(_TIERS, 3) if self.policy == "pyramid" else 1

    @property
    def scored(self) -> bool:
        """Whether attention decides what is pinned."""
        return not isinstance(self.method, Streaming)

    @property
    def chunked(self) -> bool:
        """Whether a prompt is cut chunk by chunk while it is read."""
        return self.prefill == CHUNKED_PREFILL

    @property
    def rows(self) -> int:
        """The newest queries that vote; 0 if none do, or all that there ever were."""
        method = self.method
        if isinstance(method, SnapKV):
            return method.window
        if isinstance(method, LayerSplit):
            return method.window_rows
        return 1 if isinstance(method, TOVA) else 0

    def layer_types(self, count: int) -> list[str]:
        """What vLLM is told of `count` layers: sparse ones are windowed."""
        sparse = count - self.full_layers
        return ["full_attention"] * self.full_layers + ["sliding_attention"] * sparse

    def layout(self, block_size: int, tier: int = 0) -> Layout:
        """Pinned blocks and recent tokens that make up the budget; ValueError if none do."""
        return self.layouts(block_size)[tier]

    def layouts(self, block_size: int) -> tuple[Layout, ...]:
        """The layout of each tier."""
        positive("block_size", block_size)
        recent = self._recent(block_size)
        pinned = self.budget - recent
        if pinned < block_size or pinned % block_size:
            raise ValueError(
                f"expected a budget of whole blocks of {block_size} tokens, at least one, beside "
                f"{recent} recent tokens, got budget {self.budget}"
            )
        if recent < max(1, self.rows):
            raise ValueError(
                f"expected at least {max(1, self.rows)} recent tokens, those whose queries vote, "
                f"got {recent} of budget {self.budget}"
            )
        method, blocks = self.method, [pinned // block_size]
        if isinstance(method, Streaming) and pinned < method.sinks:
            wanted = -(-method.sinks // block_size) * block_size
            fits = f"budget={wanted + recent}"
            if wanted < self.budget:
                fits = f"recent={self.budget - wanted} or {fits}"
            raise ValueError(
                f"expected room for {method.sinks} sinks, got {pinned} tokens beside {recent} "
                f"recent ones of budget {self.budget}: {fits} would do"
            )
        if isinstance(method, Pyramid):
            blocks = tier_blocks(blocks[0], block_size, self.tiers, method.beta)
        grows = isinstance(method, SnapKV)
        return tuple(Layout(block_size, b, recent, grows, self.chunked) for b in blocks)

    def _recent(self, block_size: int) -> int:
        """Recent tokens: as asked, or what the policy protects and the part of a block beside."""
        if self.recent is not None:
            return self.recent
        method = self.method
        if isinstance(method, Streaming):
            return self.budget - -(-max(1, method.sinks) // block_size) * block_size
        wish = self.rows
        if isinstance(method, H2O):
            wish = self.budget - math.floor(self.budget * exact(method.heavy_fraction))
        if isinstance(method, LayerSplit):
            wish = max(wish, min(256, self.budget // 4) if method.recent is None else method.recent)
        return self.budget - (self.budget - wish) // block_size * block_size

    def _check_method(self) -> None:
        method = self.method
        if isinstance(method, Streaming) and method.positions != "original":
            raise ValueError(f"expected positions='original', got {method.positions!r}")
        if self.policy == "h2o" and self.recent is not None and "heavy_fraction" in self.options:
            raise ValueError("expected recent or heavy_fraction, which is the rest, got both")
        if isinstance(method, Pyramid):
            positive(_TIERS, self.tiers, at_least=2)
            if method.rounding != "exact":
                raise ValueError(f"expected rounding='exact', got {method.rounding!r}")
        if isinstance(method, LayerSplit) and (method.accum, method.budget_is) != ("ema", "window"):
            raise ValueError(
                "expected accum='ema' and budget_is='window' (scores are sums over the last rows), "
                f"got {method.accum!r} and {method.budget_is!r}"
            )


def parse(additional_config: Any) -> Settings | None:
    """The settings in vLLM's `additional_config`, or None where nothing is asked for."""
    entry = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise ValueError(f"expected additional_config[{KEY!r}] to be a mapping, got {entry!r}")
    if entry.get("policy") == FULL:
        return None
    known = {f.name for f in dataclasses.fields(Settings)}
    if unknown := sorted(set(entry) - known):
        raise ValueError(f"expected {KEY} settings in {sorted(known)}, got {unknown}")
    if missing := sorted({"policy", "budget"} - set(entry)):
        raise ValueError(f"expected {KEY} settings with {', '.join(missing)}, got {dict(entry)}")
    return Settings(**entry)
