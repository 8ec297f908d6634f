"""An independent reading of the block layout: Hugging Face's model, a dense cache, explicit masks.

Every layer keeps every key for ever; what the layout would have dropped is masked. Scores, pooling
and choice are written out again here, slot by slot, sharing nothing with `sparsekv`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache


@dataclass
class BlockEvictor:
    """Layers from `full_layers` on hold `pinned` tokens and at least the newest `recent`.

    rows: newest queries that vote (0: the first tokens are pinned). kernel: max pooling, 1: none.
    grows: nothing goes after the prompt. one_set: all heads of a layer vote for the same tokens.
    by_layer: layers that pin another number of tokens. all_rows: every query that there was votes.
    """

    full_layers: int
    block_size: int
    pinned: int
    recent: int
    rows: int = 0
    kernel: int = 1
    grows: bool = False
    one_set: bool = False
    by_layer: dict[int, int] = field(default_factory=dict)
    all_rows: bool = False
    received: dict[int, Tensor] = field(default_factory=dict)  # layer: [HK, S], by position
    queries: dict[int, list[Tensor]] = field(default_factory=dict)  # layer: [HQ, D] a position
    held: dict[int, list[Tensor]] = field(default_factory=dict)  # layer: positions a KV head
    prompt: int = 0

    def attend(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        """The attention of one layer; query [1, HQ, T, D], key and value [1, HK, S, D]."""
        layer, (tokens, total) = module.layer_idx, (query.shape[2], key.shape[2])
        heads, group = key.shape[1], query.shape[1] // key.shape[1]
        if layer == 0 and tokens == total:
            self.prompt, self.queries, self.held, self.received = total, {}, {}, {}
        seen = torch.ones(heads, tokens, total, dtype=torch.bool).tril(total - tokens)
        if layer >= self.full_layers:
            if tokens < total:  # a decode step, or a chunk of a prompt that is not the first
                self._cut(layer, key[0], total - tokens, group, scaling)
                seen[:, :, : total - tokens] = False
                for head, positions in enumerate(self.held[layer]):
                    seen[head, :, positions] = True
            self.queries.setdefault(layer, []).extend(query[0].unbind(1))
            if tokens < total:
                self.held[layer] = [
                    torch.cat([p, torch.arange(total - tokens, total)]) for p in self.held[layer]
                ]
            else:
                self.held[layer] = [torch.arange(total) for _ in range(heads)]
        logits = query[0].unflatten(0, (heads, group)) @ key[0][:, None].mT * scaling
        logits = logits.masked_fill(~seen[:, None], -torch.inf)
        weights = logits.softmax(-1)  # [HK, G, T, S]
        given = weights.mean(1).sum(1)
        given[:, : total - tokens] += self.received.get(layer, 0)
        self.received[layer] = given
        out = weights @ value[0][:, None]
        return out.flatten(0, 1).transpose(0, 1)[None], None

    def _cut(self, layer: int, keys: Tensor, computed: int, group: int, scaling: float) -> None:
        """Before a step with `computed` tokens cached: drop what the layout no longer holds."""
        end = min(self.prompt, computed) if self.grows else computed
        pinned = self.by_layer.get(layer, self.pinned)
        edge = max(pinned, (end - self.recent) // self.block_size * self.block_size)
        for head, positions in enumerate(list(self.held[layer])):
            old = positions[positions < edge]
            if len(old) <= pinned:
                continue
            if self.all_rows:
                kept = self._best(self.received[layer][head, old], old, pinned)
            elif self.rows == 0:
                kept = old[:pinned]
            else:
                votes = self._votes(layer, head, keys, positions, computed, group, scaling)
                kept = self._best(votes[: len(old)], old, pinned)
            self.held[layer][head] = torch.cat([kept, positions[positions >= edge]])

    def _votes(self, layer, head, keys, positions, computed, group, scaling) -> Tensor:
        if self.one_set:
            every = range(len(self.held[layer]) * group)
        else:
            every = range(head * group, (head + 1) * group)
        rows = torch.arange(max(0, computed - self.rows), computed)
        queries = torch.stack([self.queries[layer][i] for i in rows])  # [R, HQ, D]
        hidden = positions[None] > rows[:, None]
        total = torch.zeros(len(positions))
        for h in every:
            logits = queries[:, h] @ keys[h // group][positions].T * scaling
            total += logits.masked_fill(hidden, -torch.inf).softmax(-1).sum(0) / len(every)
        return total

    def _best(self, votes: Tensor, old: Tensor, pinned: int) -> Tensor:
        half, v = self.kernel // 2, votes.tolist()
        pooled = [max(v[max(0, j - half) : j + half + 1]) for j in range(len(v))]
        order = sorted(range(len(v)), key=lambda j: (pooled[j], j), reverse=True)
        return old[torch.tensor(sorted(order[:pinned]))]


def greedy(
    folder: str,
    prompt: list[int],
    new_tokens: int,
    evictor: BlockEvictor | None,
    chunks: list[int] | None = None,
):
    """(tokens, their log-probabilities) of one prompt, fp32; evictor None: dense.

    chunks: tokens of the parts in which the prompt is read, and cut; None: all at once.
    """
    torch.set_num_threads(1)  # threads that wait for each other crawl on a busy machine
    name = "block_evictor" if evictor else "eager"
    if evictor:
        AttentionInterface.register(name, evictor.attend)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.config._attn_implementation = name
    *first, ids = torch.tensor([prompt]).split(chunks or [len(prompt)], dim=1)
    cache = DynamicCache()
    tokens, logprobs = [], []
    with torch.no_grad():
        for part in first:
            model(part, past_key_values=cache, use_cache=True)
            if evictor:
                evictor.prompt = len(prompt)
        for _ in range(new_tokens):
            logits = model(ids, past_key_values=cache, use_cache=True).logits[0, -1]
            token = int(logits.argmax())
            tokens.append(token)
            logprobs.append(float(logits.log_softmax(0)[token]))
            ids = torch.tensor([[token]])
    return tokens, logprobs
