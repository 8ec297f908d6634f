"""A runtime of a few lines, one layer of one row: it asks a policy what the real runtime asks.

`GOLDEN` is a worked example with 2 query heads on 1 KV head, 8 prompt tokens and a 9th to decode.
Its keys and queries stand after RoPE; the softmax scale is 1/2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekv.kernels.topk import select_topk
from sparsekv.policies import LayerPlan, ModelShape, Need, Policy, Selection, Stats

# fmt: off
KEYS = [[0, 0, 1, 2], [-2, -2, 2, 2], [-1, -1, 2, 0], [-1, 2, -1, 0], [1, 0, -2, -2], [2, 1, 2, 0],
        [2, -1, 0, 1], [-2, -1, -2, 0], [2, -2, -1, 0]]
QUERIES = [
    [[0, 1, 1, 2], [-1, 0, 2, -1], [-1, 2, 0, 0], [1, 0, 2, 1], [-2, -2, 0, 2], [-2, 1, 1, 1],
     [2, -2, 0, 2], [-1, -2, 0, -2], [-1, 2, 1, 2]],
    [[1, -1, 2, -2], [2, 1, -1, 1], [0, 2, 2, -1], [0, -1, 1, 1], [2, 2, 2, 2], [2, -2, -2, 0],
     [-1, 2, 1, 0], [0, 0, 2, -2], [0, 1, 0, 2]],
]
# fmt: on
GOLDEN_KEYS = torch.tensor(KEYS, dtype=torch.float64)  # [9, D]
GOLDEN_QUERIES = torch.tensor(QUERIES, dtype=torch.float64)  # [HQ, 9, D]


def golden_prefill() -> Tensor:
    """Probabilities of the 8 prompt rows, [HQ, 8, 8]."""
    return causal_probabilities(GOLDEN_QUERIES[:, :8], GOLDEN_KEYS[:8].expand(2, -1, -1), 0.5)


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
    sums = rows.sum(1).unflatten(0, (num_kv_heads, -1))  # [HK, G, S]
    reduced = {"mean": sums.mean, "sum": sums.sum, "max": sums.amax}[need.group](1)
    return reduced.float()[None]


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

    def kept(self) -> list[list[int]]:
        """Positions per KV head, ascending."""
        return [sorted(head) for head in self.positions[0].tolist()]

    def decode(self, token: int, attend: Callable[[Tensor], Tensor]) -> None:
        """One step. attend: positions [1, HK, S] -> probabilities [HQ, S]."""
        full = self.plan.budget is not None and self.positions.shape[-1] >= self.plan.budget
        if self.plan.decode == "replace" and full:
            self._drop(token)
        new = self.positions.new_full((*self.positions.shape[:2], 1), token)
        self.positions = torch.cat([self.positions, new], -1)
        self.state = torch.cat([self.state, torch.zeros(new.shape)], -1)
        need = self.policy.needs(self.layer, "decode")
        if need is not None:
            row = columns(attend(self.positions)[:, None], need, self.positions.shape[1])
            self.state = self.policy.observe(self.layer, "decode", self.state, row, self.positions)
        if self.plan.decode == "evict" and full:
            self._drop(token)

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
) -> Row:
    """Plan, observe, score, select for a prompt with probabilities [HQ, T, T]."""
    tokens = probabilities.shape[-1]
    model = shape(num_layers, probabilities.shape[0], num_kv_heads)
    plan = policy.plan(model, tokens, budget)[layer]
    positions = torch.arange(tokens, dtype=torch.int32).expand(1, num_kv_heads, -1).contiguous()
    state, sums = torch.zeros_like(positions, dtype=torch.float32), None
    need = policy.needs(layer, "prefill")
    if need is not None:
        sums = columns(probabilities, need, num_kv_heads)
        state = policy.observe(layer, "prefill", state, sums, positions)
    if plan.budget is None or tokens <= plan.budget:
        return Row(policy, plan, layer, positions, state)
    lengths = torch.full((1, num_kv_heads), tokens, dtype=torch.int32)
    recent = torch.tensor([min(plan.recent, tokens)], dtype=torch.int32)
    stats = Stats(sums, state if policy.stateful else None, positions, lengths, recent)
    scores = policy.score(layer, stats)
    keep = torch.full_like(lengths, plan.budget)
    safe = protected(positions, plan, tokens)
    chosen = policy.select(scores, keep, safe, topk, layer=layer, stats=stats)
    assert chosen.count.tolist() == keep.tolist()
    index = chosen.index[..., : plan.budget].long()
    return Row(policy, plan, layer, positions.gather(-1, index), state.gather(-1, index))
