"""What an eviction policy is: plan the budgets, name the statistic, score the keys.

A policy sees tensors and returns tensors; it owns no state, imports no kernel and knows no model.
The runtime (`sparsekv/attention.py`) asks, in this order:

    plan(shape, tokens, budget)      once per row and prefill   -> budgets, integer arithmetic only
    needs(layer, phase)              which softmax statistic the kernels must hand out
    features(layer, phase)           what else it must know of the keys when something must go
    observe(layer, phase, ...)       fold that statistic into the per-slot state (stateful policies)
    score(layer, stats)              higher is kept; called when something must go
    select(scores, keep, ...)        which keys stay; the default is per-head top-k

Layers are numbered among the layers the policy governs: sliding-window layers keep their window and
are never shown to a policy.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from sparsekv.policies.features import Feature

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class ModelShape:
    """The governed layers of a model: `num_layers` of them, heads as this process sees them."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class HeadPlan:
    """What one KV head keeps where the heads of a layer differ; fields as in `LayerPlan`."""

    budget: int | None
    sinks: int = 0
    recent: int = 0


@dataclass(frozen=True)
class LayerPlan:
    """What one layer keeps per KV head of one row.

    budget: slots held after eviction; None keeps every token for ever.
    sinks / recent: the first / newest real tokens that are never evicted (they count in budget).
    decode: "grow" appends every generated token; "replace" lets it overwrite the lowest-scored slot
    before attention once `budget` slots are in use, so never more than `budget` are held; "evict"
    attends budget + 1 keys, then drops the lowest; "interval" appends until more than `budget`
    slots are held after a step, then keeps the `low` best by the statistics over the keys held.
    "replace" and "evict" do not ask `score`: they go by the score per slot that a stateful policy
    observes, or by position (`Policy.evicts_by`).
    prefill: slots that a prompt leaves; None: budget.
    low: slots that a compression of decode="interval" leaves, and only there.
    heads: one plan a KV head, in place of budget, sinks and recent, which then say nothing.
    select: tokens that a decode step attends, in whole pages that its query picks; all stay cached.
    None: it attends all of them. Only with `Policy.selects_pages`.
    """

    budget: int | None
    sinks: int = 0
    recent: int = 0
    decode: Literal["grow", "replace", "evict", "interval"] = "grow"
    prefill: int | None = None
    low: int | None = None
    heads: tuple[HeadPlan, ...] | None = None
    select: int | None = None


@dataclass(frozen=True)
class Gumbel:
    """Noise on the logits x_ij before the softmax: p_ij = softmax_j( (x_ij + zeta_ij) / tau ).

    zeta_ij is gumbel(seed, layer, query head, i, j) of `policies/noise.py` with positions i and j;
    kind "none" sets it to 0. tau = min(tau_end, tau_start + itr (tau_end - tau_start) / tau_steps),
    itr the decode steps since the prompt, 0 in the prompt.
    """

    seed: int = 0
    tau_start: float = 1.0
    tau_end: float = 2.0
    tau_steps: int = 128
    kind: Literal["gumbel", "none"] = "gumbel"


@dataclass(frozen=True)
class Need:
    """A reduction of softmax columns p_ij over query rows i, then over the query heads of a group.

    statistic: the sum or the largest of p_ij, or how many rows have p_ij < 1 / t_i, below the mean
    of the t_i keys that row i sees.
    rows: the last `rows` query rows (None: every row). In the decode phase there is one row, unless
    a layer drops keys at intervals: then the statistic is made when it does, of its last queries.
    group: how the G query heads of a KV head are reduced; "layer_mean" averages all HQ heads.
    noise: what is done to the logits first.
    """

    statistic: Literal["sum", "max", "count"] = "sum"
    rows: int | None = None
    group: Literal["mean", "max", "sum", "layer_mean"] = "mean"
    noise: Gumbel | None = None


@dataclass(frozen=True)
class Stats:
    """What a policy may look at when it scores; keys stand in ascending position order.

    columns: the statistic that `needs` asked for, fp32 [B, HK, S], or None.
    state: the per-slot scores that `observe` accumulated, fp32 [B, HK, S], or None.
    positions: index of each key's token among the real tokens of its row, int32 [B, HK, S].
    lengths: number of valid keys, int32 [B, HK]; keys beyond it are padding.
    recent: per row, the number of newest keys protected by the plan (by that of its first head,
        where heads have plans of their own), int32 [B].
    features: what `Policy.features` asked for, each fp32 [B, HK, S]; junk beyond `lengths`.
    """

    columns: Tensor | None
    state: Tensor | None
    positions: Tensor
    lengths: Tensor
    recent: Tensor
    features: Mapping[Feature, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Selection:
    """Kept keys. index: int32 [B, HK, K] ascending, padded with -1; count: int32 [B, HK]."""

    index: Tensor
    count: Tensor


class TopK(Protocol):
    """The best `keep` int32 [B, R] of S keys in each of B x R lists, ties to the higher index.

    scores fp32 and protected bool (always kept, counted in keep) are [B, R, S]. lengths: int32
    [B, R] valid keys, or None: those of the layer's KV heads, then R = HK.
    """

    def __call__(
        self, scores: Tensor, keep: Tensor, protected: Tensor, lengths: Tensor | None = None
    ) -> Selection:
        """The selection."""


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
    prunes: ClassVar[bool] = False  # a layer of a prompt sees fewer tokens than the one before
    extra_passes: ClassVar[bool] = False  # the budget applies once they have run over a prompt
    note: ClassVar[str | None] = None  # what a report must say about its figures
    # What `generate` must not be asked for ("assisted", "beams"), and why.
    refuses: ClassVar[Mapping[str, str]] = MappingProxyType({})
    # Prompts over budget are read, and cut, so many tokens at a time inside each layer.
    prefill_block: ClassVar[int | None] = None
    signed: ClassVar[bool] = False  # scores may be negative
    # "local": every rank decides for its own heads; "refused": the heads of a layer must agree.
    tensor_parallel: ClassVar[Literal["local", "refused"]] = "local"

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "observe" in vars(cls) and "decay" not in vars(cls) and cls.decay is not Policy.decay:
            raise TypeError(
                f"expected {cls.__name__} to say with decay() what its observe() does in a decode "
                "step (None: no decay), got the decay of the class that it extends"
            )

    def ready(self) -> None:  # noqa: B027  # most lack nothing
        """Raise ValueError, saying what to pass, if the policy lacks what it needs to run."""

    def fits(self, shape: ModelShape) -> None:  # noqa: B027  # most fit every model
        """Raise ValueError if the policy carries data of a model of another shape."""

    def with_tokenizer(self, tokenizer: Any) -> Policy:
        """The policy with this tokenizer, if it needs one and has none."""
        return self

    @abstractmethod
    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        """Per-layer plans for a row of `tokens` real tokens and an average `budget` per KV head."""

    def needs(self, layer: int, phase: Phase) -> Need | None:
        """The statistic that `layer` needs in `phase`, or None."""
        return None

    def features(self, layer: int, phase: Phase) -> tuple[Feature, ...]:
        """What `score` and `select` will look up in `Stats.features`."""
        return ()

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

    def select(
        self,
        scores: Tensor,
        keep: Tensor,
        protected: Tensor,
        topk: TopK,
        *,
        layer: int,
        stats: Stats,
    ) -> Selection:
        """Keys that stay. keep: int32 [B, HK]; protected: bool [B, HK, S].

        A head holds at most `keep` afterwards, unless the policy is ragged: then the heads of a row
        hold at most the sum of keep together. It may hold fewer. What the last call of `topk`
        answered may be returned as it came; to see any other selection the host waits for the
        device once a layer, and refuses with a ValueError what is no `Selection` of so many keys.
        """
        return topk(scores, keep, protected)


def positive(name: str, value: int, at_least: int = 1) -> None:
    """Raise ValueError unless `value` is an integer >= `at_least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"expected {name} to be an integer >= {at_least}, got {value!r}")


def number(name: str, value: float, at_least: float = 0.0, at_most: float = math.inf) -> None:
    """Raise ValueError unless `value` is a finite number from `at_least` to `at_most`."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not (real and at_least <= value <= at_most and value < math.inf):  # NaN fails here too
        closed = f"between {at_least:g} and {at_most:g}"
        limits = f">= {at_least:g}" if at_most == math.inf else closed
        raise ValueError(f"expected {name} {limits}, got {value!r}")


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


def flag(name: str, value: bool) -> None:
    """Raise ValueError unless `value` is True or False: "false" of a file would count as True."""
    if not isinstance(value, bool):
        raise ValueError(f"expected {name} to be True or False, got {value!r}")


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
