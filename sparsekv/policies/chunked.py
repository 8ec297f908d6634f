"""ChunkKV: whole stretches of text stay or go, the same ones in every head (arXiv 2502.00299).

    chunk of token j = position_j // chunk
    score_j = mean of the scorer's scores over the tokens of j's chunk and over the KV heads
    keep      the protected tokens, then the best chunks; decoding appends

The budget is kept to the token: of the last chunk that fits in part its newest tokens stay. Tokens
that the scorer protects (SnapKV's window) are no part of their chunk's mean. Of equal chunks the
newer one wins. One set of tokens a layer needs all heads of the layer, so a tensor-parallel model
is refused. chunk=20 is the default of kvpress' ChunkKVPress; the paper's sharing of one layer's
choice with the next ones is not done here.

Not reproduced from kvpress: row 0's chunks for every row of a batch; a budget rounded down to
chunks; windows that are protected by the score of the chunk they fall into.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sparsekv.policies._facts import Facts
from sparsekv.policies.base import Policy, Selection, Stats, TopK, positive
from sparsekv.policies.snapkv import SnapKV
from sparsekv.policies.wrapper import Wrapper, check_scorer, unprotected


@dataclass(frozen=True)
class Chunked(Wrapper):
    """Chunks of `chunk` consecutive tokens, ranked by their mean score."""

    scorer: Policy = field(default_factory=SnapKV)
    chunk: int = 20

    name: ClassVar[str] = "chunked"
    keeps: ClassVar[str] = "stretches of consecutive tokens that score best"
    paper: ClassVar[str] = "ChunkKV, arXiv 2502.00299"
    facts: ClassVar[Facts] = Facts(
        protects="what its scorer protects",
        budget="as its scorer",
        acts="once, after the prompt",
        flops="as its scorer, and 2 chunk T HK additions",
        bytes="as its scorer, and its scores `chunk` times more",
    )

    def __post_init__(self) -> None:
        check_scorer(self, self.scorer)
        positive("chunk", self.chunk)

    @property
    def tensor_parallel(self) -> Literal["local", "refused"]:  # type: ignore[override]
        """The heads of a layer keep one set."""
        return "refused"

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
        free = unprotected(protected, stats.lengths)
        layer_scores = torch.where(free, scores, 0.0).mean(1, keepdim=True).expand_as(scores)
        return topk(self._chunk_means(layer_scores, free, stats.positions), keep, protected)

    def _chunk_means(self, scores: Tensor, free: Tensor, positions: Tensor) -> Tensor:
        """The mean over the free tokens of each token's chunk, [B, HK, S]; 0 without any.

        Sums run in the order of positions, token by token, so that they repeat to the bit.
        """
        width = scores.shape[-1]
        chunk = positions // self.chunk
        rank = torch.arange(width, device=scores.device).expand_as(chunk)
        begins = torch.ones_like(free)
        begins[..., 1:] = chunk[..., 1:] != chunk[..., :-1]
        first = torch.where(begins, rank, 0).cummax(-1).values
        total, count = torch.zeros_like(scores), torch.zeros_like(scores)
        for offset in range(min(self.chunk, width)):
            at = first + offset
            inside = at < width
            at = at.clamp_max(width - 1)
            inside &= (chunk.gather(-1, at) == chunk) & free.gather(-1, at)
            total += torch.where(inside, scores.gather(-1, at), 0.0)
            count += inside
        return total / count.clamp_min(1)
