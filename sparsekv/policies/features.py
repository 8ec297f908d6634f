"""What a policy may ask to know about cached keys and values, besides softmax statistics.

A feature is a question with its parameters; the runtime answers it (`sparsekv/features.py`) with
fp32 [B, HK, S], only when something is dropped. k_j and v_j are a key and a value of one KV head,
keys as they are cached (after RoPE); n is the number of keys of a head, j its index among them in
ascending position; h runs over the G query heads of the KV head, and mean_h is their mean.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """Base of all features."""


@dataclass(frozen=True)
class KeyNorm(Feature):
    """|k_j|_2."""


@dataclass(frozen=True)
class KeyAnchor(Feature):
    """cos(k_j, a) with the anchor a = mean_i k_i / |k_i|_2 over the n keys."""


@dataclass(frozen=True)
class ValueNorm(Feature):
    """|v_j|_2."""


@dataclass(frozen=True)
class ProjectedValueNorm(Feature):
    """mean_h |v_j W_O^(h)|_1: what v_j can add to the layer's output. W_O^(h) is [D, D_model]."""


@dataclass(frozen=True)
class ExpectedProbability(Feature):
    """mean_h softmax_{j: position >= sinks} z_hj, the attention that future queries will pay.

        z_hj = c k_j.mu_h + c^2 k_j' Sigma_h k_j / 2      c the softmax scale, 1 / sqrt(D) mostly

    the logarithm of E exp(c q.k_j) for Gaussian q. mu and Sigma are mean and covariance of the
    prompt's queries from position `sinks` on, taken before RoPE and turned to the mean rotation of
    the `future` positions that follow. covariance=False leaves out the quadratic term. The first
    `sinks` tokens get 0.
    """

    sinks: int = 4
    future: int = 512
    covariance: bool = True


@dataclass(frozen=True)
class GroupMaxWindow(Feature):
    """mean over the last `rows` queries i of softmax_{j < n - rows}( max_h x_hij ), x the logits.

    The last `rows` keys get 0.
    """

    rows: int


@dataclass(frozen=True)
class KeySimilarity(Feature):
    """Redundancy R_j of R-KV: the softmax over the n keys of each key's mean cosine with them.

    A key's cosine with itself does not count, nor does its cosine with the last other key that is
    nearer than `threshold`: of near duplicates the newest stays.
    """

    threshold: float = 0.5
