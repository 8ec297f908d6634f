"""Scores that live on from step to step."""

from __future__ import annotations

from torch import Tensor

from reference.keyformer import gumbel_noise, perturbed, temperature
from reference.scores import innermost, window_votes
from reference.types import View
from reference.votes import column_sums


def observe(view: View, phase: str, probabilities: Tensor) -> None:
    """Fold the probabilities [HQ, R, N] of this forward into the scores of the layer."""
    policy = innermost(view.policy)
    if view.plan.budget is None:
        return
    old, votes = 1.0, None
    if policy.name in ("streaming", "duo"):
        for head in view.heads:
            head |= {j: float(j) for j in head}
    elif policy.name == "h2o":
        votes = column_sums(probabilities, view.kv_heads, policy.group)
    elif policy.name == "keyformer":
        votes = column_sums(_noisy(view, probabilities), view.kv_heads, policy.group)
    elif policy.name == "tova":
        old, votes = 0.0, column_sums(probabilities[:, -1:], view.kv_heads, "layer_mean")
    elif policy.name == "layersplit" and phase == "prefill":
        old, votes = 0.0, window_votes(view)
    elif policy.name == "layersplit":
        old = 1 - 1 / policy.window_rows if policy.accum == "ema" else 1.0
        votes = column_sums(probabilities, view.kv_heads, policy.group)
    if votes is not None:
        for head, row in zip(view.heads, votes.tolist(), strict=True):
            head |= {j: old * s + row[j] for j, s in head.items()}


def _noisy(view: View, probabilities: Tensor) -> Tensor:
    """Keyformer's rows: the logits are log-probabilities up to a constant of the row."""
    policy, logits = view.policy, probabilities.log()
    tau = temperature(policy.tau_start, policy.tau_end, policy.tau_steps, view.steps)
    if policy.noise == "none":
        return perturbed(logits, logits.new_zeros(()), tau)
    noise = gumbel_noise(policy.seed, view.layer, len(view.q), view.at, view.seen)
    return perturbed(logits, noise, tau)
