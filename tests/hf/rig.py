"""The common rig of the tests in this folder: a tiny Llama, random prompts, and drivers.

3 layers, 4 query heads, 2 KV heads, head dim 16, fp32, pad id 0, no eos; prompt ids are 2 .. 127.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import sparsekv
from sparsekv.hf.compat import cache_key, output_cache
from sparsekv.policies import H2O, Full, LayerSplit, Policy, Pyramid, SnapKV, Streaming

VOCABULARY = 128
# Windows small enough that prompts of some 40 tokens are longer than them.
POLICIES: dict[str, Policy] = {
    "full": Full(),
    "streaming": Streaming(),
    "streaming-cache": Streaming(positions="cache"),
    "h2o": H2O(),
    "snapkv": SnapKV(window=8),
    "pyramid": Pyramid(window=4, beta=4),
    "layersplit": LayerSplit(full_layers=1, window_rows=8),
    "layersplit-sum": LayerSplit(full_layers=1, window_rows=8, accum="sum"),
}
EVICTING = [name for name in POLICIES if name != "full"]


def tiny_llama(seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """A random Llama whose greedy text does not settle on one token."""
    torch.manual_seed(seed)
    plain = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "initializer_range": 0.25,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**plain, **config}))
    model.lm_head.weight.data[0] = 0.0  # no text of its own contains padding
    return model.eval()


def prompt(length: int, seed: int = 0) -> Tensor:
    """Random ids [1, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (1, length), generator=generator)


def every_token(seed: int = 0) -> Tensor:
    """Each id once, ids [1, 126]: keys of one token have one norm, and rounding would rank them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(VOCABULARY - 2, generator=generator)[None] + 2


def left_padded(*rows: Tensor) -> dict[str, Tensor]:
    """input_ids and attention_mask of a batch of rows [1, T_i]."""
    width = max(row.shape[1] for row in rows)
    pads = [width - row.shape[1] for row in rows]
    pad = torch.nn.functional.pad
    return {
        "input_ids": torch.cat([pad(row, (p, 0)) for row, p in zip(rows, pads, strict=True)]),
        "attention_mask": torch.cat(
            [pad(torch.ones_like(row), (p, 0)) for row, p in zip(rows, pads, strict=True)]
        ),
    }


class Run:
    """What a greedy `generate` gave: new tokens [B, new], logits [new, B, V], the cache."""

    def __init__(self, output: Any, prompt_length: int) -> None:
        self.sequences = output.sequences
        self.tokens = output.sequences[:, prompt_length:]
        self.logits = torch.stack(output.logits)
        self.cache = output_cache(output)


def greedy(model: Any, ids: Tensor, new: int = 12, **kwargs: Any) -> Run:
    """`model.generate` without sampling, with everything returned."""
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    output = model.generate(ids, max_new_tokens=new, **options, **kwargs)
    return Run(output, ids.shape[1])


class Loop:
    """A manual loop over a model and a cache (`new_cache` by default), without position_ids."""

    def __init__(self, model: Any, cache: Any = None) -> None:
        self.model = model
        self.cache = sparsekv.new_cache(model) if cache is None else cache

    @classmethod
    def dense(cls, model: Any) -> Loop:
        """Over a DynamicCache."""
        return cls(model, DynamicCache())

    @torch.no_grad()
    def feed(self, ids: Tensor, **kwargs: Any) -> Tensor:
        """Logits [B, T, V] of ids [B, T]."""
        kwargs = {cache_key(self.model): self.cache, **kwargs}
        return self.model(input_ids=ids, use_cache=True, **kwargs).logits

    def generate(self, ids: Tensor, new: int) -> tuple[list[int], Tensor]:
        """Greedy tokens of one row and their logits [new, V]; the last token is not fed."""
        tokens, logits = [], []
        for _ in range(new):
            logits.append(self.feed(ids)[0, -1])
            tokens.append(int(logits[-1].argmax()))
            ids = torch.tensor([[tokens[-1]]])
        return tokens, torch.stack(logits)

    def kept(self, row: int = 0) -> list[list[list[int]]]:
        """Kept columns by layer and KV head."""
        return kept(self.cache, row)


def kept(cache: Any, row: int = 0) -> list[list[list[int]]]:
    """Kept columns of a row by layer and KV head, ascending."""
    heads = cache.state.store(0)[0].lens.shape[2]
    layers = range(len(cache.layers))
    return [[cache.kept_positions(i, row, h) for h in range(heads)] for i in layers]


def slot_scores(cache: Any, layer: int, row: int, head: int) -> dict[int, float]:
    """Position -> accumulated score of a stateful policy."""
    store, local = cache.state.store(layer)
    count = int(store.lens[local, row, head])
    positions = store.view(local, "positions")[row, head, :count].tolist()
    return dict(
        zip(positions, store.view(local, "scores")[row, head, :count].tolist(), strict=True)
    )


def patched(model: Any, policy: str, budget: int | float, **kwargs: Any) -> Any:
    """`sparsekv.patch` with the policy of that name in `POLICIES`."""
    return sparsekv.patch(model, POLICIES[policy], budget, **kwargs)
