"""What an eviction policy is: plan the budgets, name the statistic, score the keys.

A policy sees tensors and returns tensors; it owns no state, imports no kernel and knows no model.
The runtime (`sparsekv/attention.py`) asks, in this order:

    plan(shape, tokens, budget)      once per row and prefill   -> budgets, integer arithmetic only
    needs(layer, phase)              which softmax statistic the kernels must hand out
    observe(layer, phase, ...)       fold that statistic into the per-slot state (stateful policies)
    score(layer, stats)              higher is kept; called when something must go
    select(scores, keep, ...)        which keys stay; the default is per-head top-k

Layers are numbered among the layers the policy governs: sliding-window layers keep their window and
are never shown to a policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

Phase = Literal["prefill", "decode"]
TopK = Callable[[Tensor, Tensor, Tensor], "Selection"]


@dataclass(frozen=True)
class ModelShape:
    """The governed layers of a model: `num_layers` of them, heads as this process sees them."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LayerPlan:
    """What one layer keeps per KV head of one row.

    budget: slots held after eviction; None keeps every token for ever.
    sinks / recent: the first / newest real tokens that are never evicted (they count in budget).
    decode: "grow" appends every generated token; "replace" lets it overwrite the lowest-scored slot
    before attention once `budget` slots are in use, so never more than `budget` are held; "evict"
    attends budget + 1 keys, then drops the lowest.
    select: tokens that a decode step attends, in whole pages that its query picks; all stay cached.
    None: it attends all of them. Only with `Policy.selects_pages`.
    """

    budget: int | None
    sinks: int = 0
    recent: int = 0
    decode: Literal["grow", "replace", "evict"] = "grow"
    select: int | None = None


@dataclass(frozen=True)
class Need:
    """A reduction of softmax columns p_ij over query rows i, then over the query heads of a group.

    rows: the last `rows` query rows (None: every row). In the decode phase there is one row.
    group: how the G query heads of a KV head are reduced; "layer_mean" averages all HQ heads.
    """

    statistic: Literal["sum", "max", "count"] = "sum"
    rows: int | None = None
    group: Literal["mean", "max", "sum", "layer_mean"] = "mean"


@dataclass(frozen=True)
class Stats:
    """What a policy may look at when it scores; keys stand in ascending position order.

    columns: the statistic that `needs` asked for, fp32 [B, HK, S], or None.
    state: the per-slot scores that `observe` accumulated, fp32 [B, HK, S], or None.
    positions: index of each key's token among the real tokens of its row, int32 [B, HK, S].
    lengths: number of valid keys, int32 [B, HK]; keys beyond it are padding.
    recent: per row, the number of newest keys protected by the plan, int32 [B].
    """

    columns: Tensor | None
    state: Tensor | None
    positions: Tensor
    lengths: Tensor
    recent: Tensor


@dataclass(frozen=True)
class Selection:
    """Kept keys. index: int32 [B, HK, K] ascending, padded with -1; count: int32 [B, HK]."""

    index: Tensor
    count: Tensor


@dataclass(frozen=True)
class Policy(ABC):
    """Base of all policies: a frozen dataclass whose fields are the hyper-parameters."""

    name: ClassVar[str]
    keeps: ClassVar[str]  # one line for tables: what survives
    paper: ClassVar[str]  # title and arXiv number
    stateful: ClassVar[bool] = False  # observe() maintains a score per slot
    evicts_by: ClassVar[Literal["score", "position"]] = "score"  # a decode step drops the lowest
    ragged: ClassVar[bool] = False  # select() gives heads counts that only the device knows
    rerotates_sinks: ClassVar[bool] = False  # cached tokens get contiguous positions
    selects_pages: ClassVar[bool] = False  # plans may say `select`: pages carry key bounds
    note: ClassVar[str | None] = None  # what a report must say about its figures

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "observe" in vars(cls) and "decay" not in vars(cls) and cls.decay is not Policy.decay:
            raise TypeError(
                f"expected {cls.__name__} to say with decay() what its observe() does in a decode "
                "step (None: no decay), got the decay of the class that it extends"
            )

    @abstractmethod
    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        """Per-layer plans for a row of `tokens` real tokens and an average `budget` per KV head."""

    def needs(self, layer: int, phase: Phase) -> Need | None:
        """The statistic that `layer` needs in `phase`, or None."""
        return None

    def observe(
        self, layer: int, phase: Phase, state: Tensor, columns: Tensor, positions: Tensor
    ) -> Tensor:
        """New per-slot state fp32 [B, HK, S] from the old one and the statistic; elementwise."""
        decay = self.decay(layer)
        return state if decay is None else decay * state + columns

    @abstractmethod
    def score(self, layer: int, stats: Stats) -> Tensor:
        """fp32 [B, HK, S]; the lowest go first. Protected and padded keys may hold anything."""

    def decay(self, layer: int) -> float | None:
        """d if a decode step does state <- d * state + columns, which a kernel can do on the way;
        None if `observe` does anything else then."""
        return None

    def select(self, scores: Tensor, keep: Tensor, protected: Tensor, topk: TopK) -> Selection:
        """Keys that stay. keep: int32 [B, HK]; protected: bool [B, HK, S]."""
        return topk(scores, keep, protected)


def positive(name: str, value: int, at_least: int = 1) -> None:
    """Raise ValueError unless `value` is an integer >= `at_least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"expected {name} to be an integer >= {at_least}, got {value!r}")


def pool_columns(columns: Tensor, kernel: int, mode: str, limit: Tensor) -> Tensor:
    """1-D pooling of [B, HK, S] along keys, stride 1, over the first `limit` [B, HK] keys only.

    "avg" counts the zero padding in its denominator, "max" pads with -inf; this is what SnapKV's
    published code does. Keys at or beyond `limit` are returned as they came.
    """
    if mode == "none" or kernel == 1:
        return columns
    inside = torch.arange(columns.shape[-1], device=columns.device) < limit[..., None]
    if mode == "avg":
        flat = torch.where(inside, columns, 0.0)
        pooled = torch.nn.functional.avg_pool1d(flat, kernel, stride=1, padding=kernel // 2)
    else:
        flat = torch.where(inside, columns, -torch.inf)
        pooled = torch.nn.functional.max_pool1d(flat, kernel, stride=1, padding=kernel // 2)
    return torch.where(inside, pooled, columns)


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"expected {name} to be one of {', '.join(allowed)}, got {value!r}")


def pooling(kernel: int, pool: str) -> None:
    """Raise ValueError unless `pool_columns` accepts this kernel (odd) and mode."""
    one_of("pool", pool, ("max", "avg", "none"))
    positive("kernel", kernel)
    if kernel % 2 == 0:
        raise ValueError(f"expected kernel to be odd, so that pooling is centred, got {kernel}")
