"""Error budgets of the attention kernels, by dtype, from the size of the numbers involved.

Inputs are compared as quantised: the truth is computed in float64 from the very tensors the kernel
saw. Probabilities and outputs are rounded to the input dtype; logits, LSE and column scores are
fp32 whatever the input, so their budget is a few ulp of the largest logit. That is where a masking
mistake shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FP32_ULPS = 2e-6  # per unit of 1 + max|logit|: rounding of the dot, of log2(e) and of exp2
_OUT_EPS = {torch.float32: 0.0, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def logit_error(max_logit: float) -> float:
    """Absolute error allowed in a logit or an LSE."""
    return _FP32_ULPS * (1.0 + max_logit)


def assert_out_close(out: Tensor, truth: Tensor, weight: Tensor, max_logit: float) -> None:
    """out is within its dtype's budget of truth.

    weight: sum_j p_j |v_j| in the shape of out: every rounding error of p, v-sum or out scales with
    it, element by element. The absolute floor covers fp16 probabilities below its normal range.
    """
    relative = 1.5 * _OUT_EPS[out.dtype] + 2.0 * logit_error(max_logit)
    floor = 1e-4 if out.dtype == torch.float16 else 1e-6
    _assert_within("out", out, truth, relative * weight + floor * (weight > 0))


def assert_lse_close(lse: Tensor, truth: Tensor, max_logit: float) -> None:
    """lse is -inf exactly where truth is, and within a few fp32 ulp elsewhere."""
    empty = truth == -torch.inf
    assert torch.equal(lse.double() == -torch.inf, empty), "rows without a key need lse = -inf"
    lse, truth = lse.double().masked_fill(empty, 0), truth.masked_fill(empty, 0)
    _assert_within("lse", lse, truth, torch.full_like(truth, logit_error(max_logit)))


def assert_scores_close(scores: Tensor, truth: Tensor, max_logit: float) -> None:
    """Column scores (sums or maxima of probabilities): relative, twice a logit's error."""
    _assert_within("scores", scores, truth, 2.0 * logit_error(max_logit) * truth.abs() + 1e-7)


def _assert_within(name: str, value: Tensor, truth: Tensor, bound: Tensor) -> None:
    assert value.shape == truth.shape, f"{name}: expected {truth.shape}, got {value.shape}"
    error = (value.double() - truth).abs()
    bad = ~(error <= bound)  # also true for NaN
    if bad.any():
        worst = torch.where(bad, error.nan_to_num(torch.inf) / (bound + 1e-30), 0.0).argmax()
        at = tuple(int(i) for i in torch.unravel_index(worst, error.shape))
        raise AssertionError(
            f"{name}{list(at)}: expected {truth[at]:.6g} within {bound[at]:.2g}, "
            f"got {value[at]:.6g}; {int(bad.sum())} of {bad.numel()} elements are out"
        )
