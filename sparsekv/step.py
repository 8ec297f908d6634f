"""One forward pass as the attention layers see it: which tokens of which row are real."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RowTensors:
    """A `Part` on one device, all int32. cu [B+1], the others [B]."""

    cu: Tensor
    used: Tensor
    pad: Tensor
    first: Tensor


@dataclass
class Part:
    """T consecutive columns of a forward that are treated alike, in every layer.

    kind: "prefill" (nothing cached yet), "chunk" (several tokens onto a cache) or "decode" (one).
    start: column of the first token, padding counted. Real tokens are a suffix of the T columns.
    lengths: int [B] real tokens among the T. seen: int [B] real tokens of the row so far, these
    included. first: int [B] first real column ever of each row.
    """

    kind: str
    start: int
    tokens: int
    lengths: np.ndarray
    seen: np.ndarray
    first: np.ndarray
    _device: dict[torch.device, RowTensors] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Column after the last token."""
        return self.start + self.tokens

    def on(self, device: torch.device) -> RowTensors:
        """The rows as sequences of a flat [B * T] token axis, on `device`."""
        if device not in self._device:
            batch = len(self.lengths)
            pad = self.tokens - self.lengths
            cu = np.append(np.arange(batch) * self.tokens + pad, batch * self.tokens)
            flat = np.concatenate([cu, self.lengths, pad, self.first]).astype(np.int32)
            tensor = torch.from_numpy(flat).to(device)
            self._device[device] = RowTensors(*tensor.split([batch + 1, batch, batch, batch]))
        return self._device[device]


def real_lengths(mask: Tensor | None, start: int, batch: int, tokens: int) -> np.ndarray:
    """Real tokens per row among columns start .. start+tokens-1 of a padding mask.

    mask: bool or 0/1 [B, >= start + tokens], or None (all real). Waits for the device.

    Raises:
        ValueError: another shape, or real tokens that padding follows.
    """
    if mask is None:
        return np.full(batch, tokens)
    if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] < start + tokens:
        raise ValueError(
            f"expected attention_mask to be a 2-D padding mask [{batch}, {start + tokens}], "
            f"got shape {tuple(mask.shape)}"
        )
    valid = mask[:, start : start + tokens].bool().cpu().numpy()
    lengths = valid.sum(1)
    if (valid != (np.arange(tokens) >= (tokens - lengths)[:, None])).any():
        raise ValueError(
            "expected left padding (zeros of attention_mask before the ones of each forward), got "
            "padding after real tokens; set tokenizer.padding_side = 'left'"
        )
    return lengths
