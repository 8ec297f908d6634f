"""PyramidInfer as a model: hidden states are dropped between layers, generated tokens in windows.

Runs the decoder layers of a Llama one by one. Layer l caches the tokens that entered it; a token
dropped after layer l is gone from all later ones. While decoding a layer keeps the head means of
its last 1 + R rows, and once R + E tokens have come since the last cut, some of the E before the
last 1 + R go. R is that of the prompt.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from reference import attention
from reference.pyramidinfer import keep_context, keep_ratio, kept_context, tail_scores

NAME = "reference-pruned"


class PrunedReference:
    """A copy of a Llama under PyramidInfer with an explicit decay: one prompt, then decode steps.

    positions[layer]: tokens that the layer holds, ascending.
    """

    def __init__(self, model: Any, policy: Any, decay: float) -> None:
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation(NAME)
        self.policy, self.decay = policy, decay
        self.layers = self.model.config.num_hidden_layers
        self.seen, self.tail, self.least = 0, 0, 0
        self.positions: list[list[int]] = [[] for _ in range(self.layers)]
        self.k: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}
        self.rows: dict[int, Tensor] = {}  # [<= 1 + R, N], head means of the last queries
        self.base: dict[int, int] = {}

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        """Logits [tokens left, V] of a prompt or of one token, ids [1, T]."""
        tokens, inner = ids.shape[1], self.model.model
        at = list(range(self.seen, self.seen + tokens))
        prompt = self.seen == 0
        if prompt:
            self.tail = 1 + int(self.policy.recent * tokens)
            self.least = min(self.policy.min_context, tokens - self.tail)
        self.seen += tokens
        hidden = inner.embed_tokens(ids)
        for layer, block in enumerate(inner.layers):
            places = torch.tensor([at])
            hidden = block(
                hidden,
                position_embeddings=inner.rotary_emb(hidden, places),
                position_ids=places,
                reference=self,
                at=at,
            )
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
            if prompt:
                left = self.prune(layer, len(at))
                hidden, at = hidden[:, left], [at[i] for i in left]
            else:
                self.shorten(layer)
        return self.model.lm_head(inner.norm(hidden))[0]

    def kept(self) -> list[list[list[int]]]:
        """Positions by layer and KV head: the same in all heads."""
        return [[list(held)] * self.model.config.num_key_value_heads for held in self.positions]

    def generate(self, ids: Tensor, new: int) -> tuple[list[int], Tensor]:
        """Greedy tokens and their logits [new, V]; the last token is not fed."""
        tokens, logits = [], []
        for _ in range(new):
            logits.append(self.feed(ids)[-1])
            tokens.append(int(logits[-1].argmax()))
            ids = torch.tensor([[tokens[-1]]])
        return tokens, torch.stack(logits)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, at: list[int], scale: float
    ) -> Tensor:
        """Attention of q [HQ, T, D] at `at` over what the layer holds and these; [T, HQ, D]."""
        if layer in self.k:
            k, v = torch.cat([self.k[layer], k], 1), torch.cat([self.v[layer], v], 1)
        self.k[layer], self.v[layer] = k, v
        self.positions[layer] += at
        visible = torch.tensor(self.positions[layer]) <= torch.tensor(at)[:, None]
        logits = attention.masked_logits(q, k, visible.expand(len(k), -1, -1), scale)
        probabilities = attention.softmax_rows(logits)
        new = probabilities.mean(0)  # [T, N]
        old = self.rows.get(layer, new[:0])
        old = torch.nn.functional.pad(old, (0, new.shape[1] - old.shape[1]))
        self.rows[layer] = torch.cat([old, new])[-self.tail :]
        return torch.einsum("htn,hnd->thd", probabilities, attention.repeated(v, q))

    def prune(self, layer: int, tokens: int) -> list[int]:
        """Indices of the tokens that go on to the next layer."""
        self.base[layer] = tokens
        context = tokens - self.tail
        keep = kept_context(
            context, layer, self.layers, self.decay, self.least, self.policy.interval
        )
        scores = tail_scores(self.rows[layer][None, :, :context], self.policy.distance_weight)
        left = keep_context(scores, keep, self.policy.sinks)
        return left + list(range(context, tokens))

    def shorten(self, layer: int) -> None:
        """Drop some generated tokens once R + E have come since the last time."""
        policy, held, recent = self.policy, len(self.positions[layer]), self.tail - 1
        if held - recent - self.base[layer] < policy.exceed:
            return
        first, last = held - self.tail - policy.exceed, held - self.tail
        scores = tail_scores(self.rows[layer][None, :, first:last], policy.distance_weight)
        ratio = policy.gen_keep * keep_ratio(layer, self.layers, policy.gen_decay)
        keep = max(int(policy.exceed * ratio), 1)
        left = [first + j for j in keep_context(scores, keep, 0)]
        order = [*range(first), *left, *range(last, held)]
        self.k[layer], self.v[layer] = self.k[layer][:, order], self.v[layer][:, order]
        self.rows[layer] = self.rows[layer][:, order]
        self.positions[layer] = [self.positions[layer][j] for j in order]
        self.base[layer] = len(order) - recent


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any
) -> tuple[Tensor, None]:
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    q, k, v = (x[0].double() for x in (query, key, value))
    out = kwargs["reference"].attend(module.layer_idx, q, k, v, kwargs["at"], scale)
    return out[None].to(query.dtype), None
