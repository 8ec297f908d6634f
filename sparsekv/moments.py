"""Mean and covariance of a prompt's queries before RoPE, gathered while the prompt comes in.

ExpectedAttention takes the queries to come for Gaussian. Their moments are those of the prompt's
queries, turned back by RoPE's inverse and then forward to the mean rotation of the positions that
follow. Parts of a prompt are merged by Chan's formula on centred sums: E[qq'] - mu mu' in fp32
would lose the covariance where the mean is large.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsekv.headwise import Queries
from sparsekv.policies.features import ExpectedProbability
from sparsekv.rope import Rotary, rotate_half

# fp32 numbers in a tile of queries: 16 MiB, large enough that launches do not count.
_TILE = 1 << 22


@dataclass(frozen=True)
class QueryMoments:
    """fp32 count [B], mean [B, HQ, D], scatter [B, HQ, D, D]: the sum of (q - mean) (q - mean)'.

    scatter is None where nobody asks for the covariance.
    """

    count: Tensor
    mean: Tensor
    scatter: Tensor | None

    def merge(self, other: QueryMoments) -> QueryMoments:
        """The moments of both sets of queries."""
        count = self.count + other.count
        share = (other.count / count.clamp_min(1))[:, None, None]
        delta = other.mean - self.mean
        mean = self.mean + share * delta
        if self.scatter is None or other.scatter is None:
            return QueryMoments(count, mean, None)
        between = (delta * share * self.count[:, None, None])[..., None] * delta[..., None, :]
        return QueryMoments(count, mean, self.scatter + other.scatter + between)

    def select_rows(self, rows: Tensor) -> QueryMoments:
        """The moments of the given rows."""
        scatter = None if self.scatter is None else self.scatter[rows]
        return QueryMoments(self.count[rows], self.mean[rows], scatter)

    def ahead(self, rotary: Rotary, seen: Tensor, future: int) -> tuple[Tensor, Tensor | None]:
        """mu [B, HQ, D] and Sigma [B, HQ, D, D] of queries at positions seen .. seen + future - 1.

        seen: int [B]. Sigma is divided by the count; both are turned by the mean rotation.
        """
        cos, sin = (x[:, None] for x in rotary.mean(seen, future))  # [B, 1, R/2]
        mean = rotate_half(self.mean, cos, sin)
        if self.scatter is None:
            return mean, None
        cos, sin = cos[:, None], sin[:, None]
        turned = rotate_half(self.scatter, cos, sin).transpose(-1, -2)
        turned = rotate_half(turned, cos, sin)
        return mean, turned / self.count.clamp_min(1)[:, None, None, None]


@dataclass(frozen=True)
class PromptMoments:
    """Moments of a layer's queries since the prompt or turn began; each kind is made once.

    queries: those of the forward that runs. seen: int [B] tokens of each row, these included.
    before: what the forwards before it left, by kind.
    """

    queries: Queries
    seen: Tensor
    before: Mapping[tuple, QueryMoments]
    rotary: Rotary | None
    made: dict[tuple, QueryMoments] = field(default_factory=dict)

    def ahead(self, feature: ExpectedProbability) -> tuple[Tensor, Tensor | None]:
        """(mu, Sigma) of the queries to come, see `QueryMoments.ahead`."""
        moments = self.of(feature)
        assert self.rotary is not None
        return moments.ahead(self.rotary, self.seen, feature.future)

    def of(self, feature: ExpectedProbability) -> QueryMoments:
        """The moments that `feature` is made of, all forwards merged."""
        kind = (feature.sinks, feature.covariance)
        if kind not in self.made:
            if self.rotary is None:
                raise ValueError("expected a cache that knows the model's RoPE, got one without")
            new = query_moments(self.queries, feature.sinks, self.rotary, feature.covariance)
            old = self.before.get(kind)
            self.made[kind] = new if old is None else old.merge(new)
        return self.made[kind]


@torch.no_grad()
def query_moments(queries: Queries, first: int, rotary: Rotary, covariance: bool) -> QueryMoments:
    """Moments before RoPE of the queries at positions >= `first`; padding sits at -1."""
    q, positions = queries.q, queries.positions
    batch, heads, tokens, dim = q.shape
    step = max(1, _TILE // (batch * heads * dim))
    moments = QueryMoments(
        q.new_zeros(batch, dtype=torch.float32),
        q.new_zeros(batch, heads, dim, dtype=torch.float32),
        q.new_zeros(batch, heads, dim, dim, dtype=torch.float32) if covariance else None,
    )
    for start in range(0, tokens, step):
        at = slice(start, start + step)
        tile = _tile_moments(q[:, :, at], positions[:, at], first, rotary, covariance)
        moments = moments.merge(tile)
    return moments


def _tile_moments(
    q: Tensor, positions: Tensor, first: int, rotary: Rotary, covariance: bool
) -> QueryMoments:
    """`query_moments` of one tile q [B, HQ, t, D]."""
    x = rotary.turn(q, -positions[:, None])
    inside = (positions >= max(first, 0)).float()
    count = inside.sum(-1)
    weights = inside / count.clamp_min(1)[:, None]
    mean = torch.matmul(weights[:, None, None], x)  # [B, HQ, 1, D]
    if not covariance:
        return QueryMoments(count, mean[:, :, 0], None)
    x.sub_(mean).mul_(inside[:, None, :, None])
    return QueryMoments(count, mean[:, :, 0], torch.matmul(x.transpose(-1, -2), x))
