"""A runtime of a few lines, one layer of one row: it asks a policy what the real runtime asks.

`GOLDEN` is a worked example with 2 query heads on 1 KV head, 8 prompt tokens and a 9th to decode.
Its keys and queries stand after RoPE; the softmax scale is 1/2.
Features are 1 everywhere unless a test gives others; `golden_features` are those of `GOLDEN`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsekv.features import Source, compute
from sparsekv.headwise import Keys, Queries, Scores
from sparsekv.kernels.topk import select_topk
from sparsekv.moments import PromptMoments
from sparsekv.policies import LayerPlan, ModelShape, Need, Policy, Selection, Stats
from sparsekv.policies.features import Feature
from sparsekv.rope import Rotary

# fmt: off
KEYS = [[0, 0, 1, 2], [-2, -2, 2, 2], [-1, -1, 2, 0], [-1, 2, -1, 0], [1, 0, -2, -2], [2, 1, 2, 0],
        [2, -1, 0, 1], [-2, -1, -2, 0], [2, -2, -1, 0]]
VALUES = [[-2, 1, -2, -1], [0, 0, -2, 2], [1, 2, -2, 1], [-1, 0, 2, -1], [1, -2, -1, 2],
          [0, 0, -1, -2], [0, 1, 0, 1], [-1, 1, 1, 2], [0, -2, 1, 0]]
QUERIES = [
    [[0, 1, 1, 2], [-1, 0, 2, -1], [-1, 2, 0, 0], [1, 0, 2, 1], [-2, -2, 0, 2], [-2, 1, 1, 1],
     [2, -2, 0, 2], [-1, -2, 0, -2], [-1, 2, 1, 2]],
    [[1, -1, 2, -2], [2, 1, -1, 1], [0, 2, 2, -1], [0, -1, 1, 1], [2, 2, 2, 2], [2, -2, -2, 0],
     [-1, 2, 1, 0], [0, 0, 2, -2], [0, 1, 0, 2]],
]
# fmt: on
GOLDEN_KEYS = torch.tensor(KEYS, dtype=torch.float64)  # [9, D]
GOLDEN_VALUES = torch.tensor(VALUES, dtype=torch.float64)  # [9, D]
GOLDEN_QUERIES = torch.tensor(QUERIES, dtype=torch.float64)  # [HQ, 9, D]


def golden_prefill() -> Tensor:
    """Probabilities of the 8 prompt rows, [HQ, 8, 8]."""
    return causal_probabilities(GOLDEN_QUERIES[:, :8], GOLDEN_KEYS[:8].expand(2, -1, -1), 0.5)


def golden_source() -> Source:
    """The 8 prompt tokens as one KV head; RoPE turns nothing and W_O is the identity per head."""
    k, v = (x[None, None, :8].float() for x in (GOLDEN_KEYS, GOLDEN_VALUES))
    positions, eight = torch.arange(8, dtype=torch.int32), torch.full((1,), 8, dtype=torch.int32)
    queries = Queries(GOLDEN_QUERIES[None, :, :8].float(), positions[None], eight)
    rotary = Rotary(torch.zeros(2))

    def last(rows: int) -> Queries:
        return Queries(queries.q[:, :, -rows:], queries.positions[:, -rows:], eight.clamp_max(rows))

    return Source(
        Keys(k, v, positions[None, None], eight[None]), np.zeros(1, dtype=int), Scores(0.5), last,
        PromptMoments(queries, eight, {}, rotary).ahead, lambda: torch.eye(4).repeat(1, 2),
    )  # fmt: skip


def golden_features(feature: Feature) -> Tensor:
    """A feature of the 8 prompt tokens, fp32 [1, 1, 8]."""
    return compute(feature, golden_source())


def golden_decode(positions: Tensor) -> Tensor:
    """Probabilities of token 8 over the cached keys at `positions` [1, 1, S] -> [HQ, S]."""
    return (0.5 * GOLDEN_QUERIES[:, 8] @ GOLDEN_KEYS[positions.flatten().long()].T).softmax(-1)


def causal_probabilities(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """softmax of causal attention, q and k [HQ, T, D] -> [HQ, T, T]."""
    logits = scale * q @ k.transpose(-1, -2)
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1)


def shape(num_layers: int = 1, num_heads: int = 2, num_kv_heads: int = 1) -> ModelShape:
    return ModelShape(num_layers, num_heads, num_kv_heads, head_dim=4)


def columns(probabilities: Tensor, need: Need, num_kv_heads: int) -> Tensor:
    """The statistic a policy needs, from probabilities [HQ, T, S] -> fp32 [1, HK, S]."""
    rows = probabilities if need.rows is None else probabilities[:, -need.rows :]
    if need.statistic == "count":
        seen = rows > 0
        rows = ((rows < 1 / seen.sum(-1, keepdim=True)) & seen).double()
    reduced = rows.amax(1) if need.statistic == "max" else rows.sum(1)  # [HQ, S]
    if need.group == "layer_mean":
        return reduced.mean(0).float().expand(1, num_kv_heads, -1)
    heads = reduced.unflatten(0, (num_kv_heads, -1))  # [HK, G, S]
    return {"mean": heads.mean, "sum": heads.sum, "max": heads.amax}[need.group](1).float()[None]


def features_of(policy: Policy, layer: int, phase: str, like: Tensor, seed: int) -> dict:
    """A table in (0, 1) for every feature that the policy asks for, fp32 like [1, HK, S]."""
    generator = torch.Generator().manual_seed(seed)
    asked = policy.features(layer, phase)
    return {feature: torch.rand(like.shape, generator=generator) for feature in asked}


def slots_after_prompt(plan: LayerPlan) -> int | None:
    """What a prompt leaves; the budget unless the plan says otherwise."""
    return plan.budget if plan.prefill is None else plan.prefill


def topk(
    scores: Tensor, keep: Tensor, protected: Tensor, lengths: Tensor | None = None
) -> Selection:
    """select_topk on [B, R, S], all S keys valid unless `lengths` says otherwise."""
    if lengths is None:
        lengths = torch.full(keep.shape, scores.shape[-1], dtype=torch.int32)
    index, count = select_topk(
        scores.flatten(0, 1), lengths.flatten(), keep.flatten(), protected=protected.flatten(0, 1)
    )
    return Selection(index.unflatten(0, keep.shape), count.unflatten(0, keep.shape))


@dataclass
class Row:
    """The cache of one layer of one row: positions int32 and state fp32, both [1, HK, S]."""

    policy: Policy
    plan: LayerPlan
    layer: int
    positions: Tensor
    state: Tensor
    features: Callable[[Feature], Tensor] | None = None

    def kept(self) -> list[list[int]]:
        """Positions per KV head, ascending; -1 pads shorter heads."""
        return [sorted(j for j in head if j >= 0) for head in self.positions[0].tolist()]

    def decode(self, token: int, attend: Callable[[Tensor], Tensor]) -> None:
        """One step. attend: positions [1, HK, S] -> probabilities [HQ, S]."""
        full = self.plan.budget is not None and self.positions.shape[-1] >= self.plan.budget
        if self.plan.decode == "replace" and full:
            self._drop(token)
        new = self.positions.new_full((*self.positions.shape[:2], 1), token)
        self.positions = torch.cat([self.positions, new], -1)
        self.state = torch.cat([self.state, torch.zeros(new.shape)], -1)
        need = self.policy.needs(self.layer, "decode")
        row = None
        if need is not None:
            row = columns(attend(self.positions)[:, None], need, self.positions.shape[1])
            self.state = self.policy.observe(self.layer, "decode", self.state, row, self.positions)
        if self.plan.decode == "evict" and full:
            self._drop(token)
        if self.plan.decode == "interval" and full:
            self._compress(row, token)

    def _compress(self, row: Tensor | None, token: int) -> None:
        """Down to `low` by what the policy gives now."""
        order = self.positions.sort(-1).indices
        self.positions = self.positions.gather(-1, order)
        self.state = self.state.gather(-1, order)
        stats = stats_of(self, row if row is None else row.gather(-1, order), token)
        keep = torch.full(self.positions.shape[:2], self.plan.low, dtype=torch.int32)
        index = self.select(keep, stats, token).index[..., : self.plan.low].long()
        self.positions = self.positions.gather(-1, index)
        self.state = self.state.gather(-1, index)

    def select(self, keep: Tensor, stats: Stats, newest: int) -> Selection:
        """What the policy keeps of the row."""
        scores = self.policy.score(self.layer, stats)
        safe = protected(self.positions, self.plan, newest + 1)
        return self.policy.select(scores, keep, safe, topk, layer=self.layer, stats=stats)

    def _drop(self, token: int) -> None:
        """Remove the lowest score, the oldest of equals; `token` is the newest and counts."""
        by_position = self.policy.evicts_by == "position"
        score = self.positions.float() if by_position else self.state.clone()
        score[protected(self.positions, self.plan, token + 1)] = torch.inf
        assert score.isfinite().any(-1).all(), "no slot may be overwritten"
        lowest = torch.where(score == score.amin(-1, keepdim=True), self.positions, 2**30)
        keep = self.positions != lowest.amin(-1, keepdim=True)
        self.positions = self.positions[keep].view(1, keep.shape[1], -1)
        self.state = self.state[keep].view_as(self.positions)


def protected(positions: Tensor, plan: LayerPlan, tokens: int) -> Tensor:
    """bool like positions: the first `sinks` and the last `recent` of `tokens` tokens."""
    return (positions < plan.sinks) | (positions >= tokens - plan.recent)


def prefill(
    policy: Policy,
    probabilities: Tensor,
    budget: int,
    *,
    num_kv_heads: int = 1,
    num_layers: int = 1,
    layer: int = 0,
    features: Callable[[Feature], Tensor] | None = None,
) -> Row:
    """Plan, observe, score, select for a prompt with probabilities [HQ, T, T].

    features: fp32 [1, HK, T] of each one that the policy asks for; random numbers otherwise.
    """
    tokens = probabilities.shape[-1]
    model = shape(num_layers, probabilities.shape[0], num_kv_heads)
    plan = policy.plan(model, tokens, budget)[layer]
    positions = torch.arange(tokens, dtype=torch.int32).expand(1, num_kv_heads, -1).contiguous()
    state, sums = torch.zeros_like(positions, dtype=torch.float32), None
    need = policy.needs(layer, "prefill")
    if need is not None:
        sums = columns(probabilities, need, num_kv_heads)
        state = policy.observe(layer, "prefill", state, sums, positions)
    row = Row(policy, plan, layer, positions, state, features)
    left = slots_after_prompt(plan)
    if left is None or tokens <= left:
        return row
    keep = torch.full((1, num_kv_heads), left, dtype=torch.int32)
    chosen = row.select(keep, stats_of(row, sums, tokens - 1), tokens - 1)
    if policy.ragged:
        assert int(chosen.count.sum()) == int(keep.sum())
    else:
        assert chosen.count.tolist() == keep.tolist()
    index = chosen.index[..., : int(chosen.count.max())].long()
    row.positions = torch.where(index >= 0, positions.gather(-1, index.clamp_min(0)), -1).int()
    row.state = state.gather(-1, index.clamp_min(0))
    return row


def stats_of(row: Row, sums: Tensor | None, newest: int) -> Stats:
    """What the policy of a row sees of its keys, which stand in ascending order."""
    policy, held = row.policy, row.positions.shape[-1]
    lengths = torch.full(row.positions.shape[:2], held, dtype=torch.int32)
    recent = torch.tensor([min(row.plan.recent, held)], dtype=torch.int32)
    phase = "prefill" if row.positions[0, 0].tolist() == list(range(held)) else "decode"
    answers = features_of(policy, row.layer, phase, row.positions, newest)
    if row.features is not None:
        answers = {feature: row.features(feature) for feature in answers}
    state = row.state if policy.stateful else None
    return Stats(sums, state, row.positions, lengths, recent, answers)
