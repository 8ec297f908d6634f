"""Which tokens of a request a layer pins, and the move: policy scores, per KV head.

When blocks leave the recent part, their tokens and the pinned ones are candidates for the pinned
blocks, where the best stay; each KV head keeps its own, the same number. With R the newest queries,
those of the last tokens held, and A the softmax over all n tokens held:

    score_j = pool( mean_{h in group} sum_{i in last R} A_hij )        candidates j; [HK, n]

At the end of a prompt all of it is held, so these are SnapKV's scores; later they are a window sum
over what is left. Candidates are older than the R queries, so every query sees every candidate.
Slots stay in order of position: kept ones move up, never past each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sparsekv.kernels.column_scores import column_scores
from sparsekv.kernels.prefill import prefill_attention
from sparsekv.kernels.topk import select_topk
from sparsekv.policies.base import pool_columns
from sparsekv.vllm.settings import Settings


@dataclass(frozen=True)
class Scorer:
    """How queries vote: the newest `rows`, reduced over the heads of a `group`, then pooled."""

    rows: int
    group: Literal["mean", "max", "sum"]
    pool: str
    kernel: int

    @classmethod
    def of(cls, settings: Settings) -> Scorer | None:
        """The scorer of the user's policy; None if it looks at no score."""
        method: Any = settings.method
        if not settings.scored:
            return None
        return cls(settings.rows, method.group, method.pool, method.kernel)


def best_slots(
    queries: Tensor, keys: Tensor, candidates: int, keep: int, scorer: Scorer, scale: float,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """The `keep` best of the first `candidates` slots, ascending, int64 [HK, keep].

    queries [R, HQ, D]: of the last R of the n tokens held; keys [n, HK, D] in order of position.
    """
    device = keys.device
    cu_q = torch.tensor([0, queries.shape[0]], dtype=torch.int32, device=device)
    cu_k = torch.tensor([0, keys.shape[0]], dtype=torch.int32, device=device)
    packed = (cu_q, cu_k, queries.shape[0], keys.shape[0])
    _, lse = prefill_attention(queries, keys, keys, *packed, softmax_scale=scale, softcap=softcap)
    columns = column_scores(
        queries, keys, lse, *packed, softmax_scale=scale, softcap=softcap, group=scorer.group
    )
    limit = torch.full(columns.shape[:2], candidates, device=device)
    scores = pool_columns(columns, scorer.kernel, scorer.pool, limit)[0, :, :candidates]
    lengths = torch.full((scores.shape[0],), candidates, dtype=torch.int32, device=device)
    index, _ = select_topk(scores.contiguous(), lengths, keep)
    return index.long()


def take(tokens: Tensor, index: Tensor) -> Tensor:
    """tokens [n, HK, D] at index [HK, keep], each head its own: [keep, HK, D]."""
    wide = index.T[..., None].expand(-1, -1, tokens.shape[-1])
    return tokens.gather(0, wide)
