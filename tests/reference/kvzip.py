"""KVzip: keys that matter when the model repeats its context, by one ranking over the model.

The context is prefilled densely; then passes, each the tokens that ask for a part of the context
and that part itself, run over the whole cache and leave nothing in it. In each pass a key of the
part scores its largest probability among [sinks | part | the pass itself].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reference import attention
from reference.evictor import Reference
from reference.heads import top
from reference.plans import slots_of
from reference.types import Head

Pass = tuple[Tensor, int, int]  # ids [1, M], first and last + 1 position of its part


def part_scores(q: Tensor, k_sinks: Tensor, k_part: Tensor, k_own: Tensor, scale: float) -> Tensor:
    """Largest restricted probability over queries and group: [HK, part].

    q [HQ, M, D]; keys [HK, ., D]; a query sees all sinks, the whole part and its own pass causally.
    """
    before, own = k_sinks.shape[1] + k_part.shape[1], k_own.shape[1]
    keys = torch.cat([k_sinks, k_part, k_own], 1)
    causal = torch.ones(len(keys), own, own, dtype=torch.bool).tril()
    visible = torch.cat([torch.ones(len(keys), own, before, dtype=torch.bool), causal], 2)
    rows = attention.softmax_rows(attention.masked_logits(q, keys, visible, scale))
    best = rows[..., k_sinks.shape[1] : before].amax(1)  # [HQ, part]
    return best.unflatten(0, (len(keys), -1)).amax(1)


def official_threshold(scores: list[float], ratio: float) -> set[int]:
    """The released rule, one key short: strictly above the value at rank int(N ratio) - 1."""
    ranked = sorted(scores, reverse=True)
    threshold = ranked[max(int(len(scores) * ratio) - 1, 0)]
    return {j for j, score in enumerate(scores) if score > threshold}


def best_of_model(scores: list[list[Head]], count: int) -> list[list[set[int]]]:
    """The `count` best (layer, head, position); of equal scores the newer, then the first head."""
    cells = [
        (-score, -j, l, h)
        for l, heads in enumerate(scores)
        for h, head in enumerate(heads)
        for j, score in head.items()
    ]
    kept: list[list[set[int]]] = [[set() for _ in heads] for heads in scores]
    for _, j, l, h in sorted(cells)[:count]:
        kept[l][h].add(-j)
    return kept


class KVzipReference(Reference):
    """Feed the context, `compress` with its passes, then feed questions and decode: all stay."""

    def reset(self) -> None:
        super().reset()
        self.part: tuple[int, int] | None = None
        self.scores: list[list[Head]] = [[{} for _ in layer] for layer in self.heads]

    def compress(self, passes: Sequence[Pass]) -> None:
        """Run the passes and keep budget x layers x heads keys, the sinks among them."""
        tokens = self.cache.get_seq_length()
        for ids, first, last in passes:
            self.part = (first, last)
            self.feed(ids)
            self.part = None
            self.cache.crop(-ids.shape[1])
        slots = slots_of(self.budget, tokens)
        if slots >= tokens:
            return
        sinks = min(self.policy.sinks, slots)
        free = [
            [{j: head.get(j, 0.0) for j in range(sinks, tokens)} for head in layer]
            for layer in self.scores
        ]
        heads = sum(len(layer) for layer in free)
        if self.policy.uniform:
            kept = [[top(head, slots - sinks) for head in layer] for layer in free]
        else:
            kept = best_of_model(free, (slots - sinks) * heads)
        self.heads = [
            [dict.fromkeys([*range(sinks), *sorted(head)], 0.0) for head in layer] for layer in kept
        ]

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if self.part is None:
            return super().attend(module, q, k, v, scale)
        q, k, v = q.double(), k.double(), v.double()
        layer, tokens = module.layer_idx, k.shape[1] - q.shape[1]
        first, last = self.part
        sinks, own = k[:, : self.policy.sinks], k[:, tokens:]
        scores = part_scores(q, sinks, k[:, first:last], own, scale)
        for head, row in zip(self.scores[layer], scores.tolist(), strict=True):
            for j, score in enumerate(row, start=first):
                head[j] = max(score, head.get(j, 0.0))
        causal = torch.ones(len(k), q.shape[1], k.shape[1], dtype=torch.bool).tril(tokens)
        rows = attention.softmax_rows(attention.masked_logits(q, k, causal, scale))
        return torch.einsum("htn,hnd->thd", rows, attention.repeated(v, q))
