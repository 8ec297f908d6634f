"""Read contexts into a sparse cache, then feed continuations one token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import sparsekv
from sparsekv.hf.compat import cache_key


class Feeding:
    """Yields the logits [R, V] that predict each token of the continuations of R rows.

    Contexts are read but for their last token, in one forward with padding on the left, and
    compressed; the last token is the first to be fed. A context of one token is read whole.

    Args:
        model: patched. contexts: token ids, all of length 1 or all longer. context_of: the context
            of each row. fed: tokens of each row after its context; rows end when they end, others
            go on.
    """

    def __init__(
        self,
        model: Any,
        contexts: Sequence[tuple[int, ...]],
        context_of: Sequence[int],
        fed: Sequence[tuple[int, ...]],
    ) -> None:
        self.model, self.cache = model, sparsekv.new_cache(model)
        short = len(contexts[0]) == 1
        self.heads = [context if short else context[:-1] for context in contexts]
        self.rows = torch.tensor(context_of, device=model.device)
        last = [() if short else contexts[i][-1:] for i in context_of]
        self.steps = [(*a, *b) for a, b in zip(last, fed, strict=True)]
        self.short = short

    @torch.no_grad()
    def __iter__(self) -> Iterator[Tensor]:
        device = self.model.device
        ids, mask = self._padded()
        logits = self._forward(ids, mask, (mask.cumsum(-1) - 1).clamp_min(0))
        if self.cache.state.policy.extra_passes:
            sparsekv.compress(self.model, self.cache, ids, mask)
        if self.short:
            yield logits[self.rows]
        if self.rows.tolist() != list(range(len(self.heads))):
            self.cache.batch_select_indices(self.rows)
        mask, position = mask[self.rows], mask.sum(-1)[self.rows]
        for step in range(max(map(len, self.steps))):
            # A row that has ended is fed anything: nothing of it is read any more.
            tokens = [row[step] if step < len(row) else 0 for row in self.steps]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            ids = torch.tensor(tokens, device=device)[:, None]
            yield self._forward(ids, mask, position[:, None] + step)

    def _padded(self) -> tuple[Tensor, Tensor]:
        """Ids and 0/1 mask, int64 [B, T], padded on the left."""
        width = max(map(len, self.heads))
        ids = [[0] * (width - len(head)) + list(head) for head in self.heads]
        mask = [[0] * (width - len(head)) + [1] * len(head) for head in self.heads]
        return (
            torch.tensor(ids, device=self.model.device),
            torch.tensor(mask, device=self.model.device),
        )

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Logits [B, V] after the last token."""
        output = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True,
            logits_to_keep=1, **{cache_key(self.model): self.cache},
        )  # fmt: skip
        return output.logits[:, -1]
