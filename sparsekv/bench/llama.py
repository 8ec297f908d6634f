"""The model of the end-to-end cases, Llama-3-8B in shape with random weights, and its clocks."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

import sparsekv
from sparsekv.bench.case import Context
from sparsekv.bench.timing import synchronize
from sparsekv.policies import ModelShape, Policy

_SIZE: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
    "max_position_embeddings": 1 << 20,
}  # fmt: skip
_TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
    "max_position_embeddings": 4096,
}  # fmt: skip
_FIRST_LAYERS = 4  # of a shallow twin; some policies leave the first three alone


def llama_config(tiny: bool) -> LlamaConfig:
    """The last token of the vocabulary ends a text, so that `generate` has something to watch."""
    size = _TINY if tiny else _SIZE
    return LlamaConfig(
        **size, bos_token_id=0, pad_token_id=0, eos_token_id=size["vocab_size"] - 1,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def llama(context: Context) -> LlamaForCausalLM:
    """The run's one set of weights: bf16 on a GPU, fp32 on a CPU."""

    def make() -> LlamaForCausalLM:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if context.on_gpu else torch.float32
        with torch.device(context.device):
            return LlamaForCausalLM._from_config(llama_config(context.tiny), dtype=dtype).eval()

    return context.once("llama", make)


def twin(context: Context, key: str) -> LlamaForCausalLM:
    """A model of its own on the same weights: contenders keep their compiled code and patches.

    key: a contender's name and setting; the same key gives the same model.
    """

    def make() -> LlamaForCausalLM:
        model = llama(context)
        shared = chain(model.parameters(), model.buffers())
        return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})

    return context.once(f"twin {key}", make)


def shallow_twin(context: Context) -> LlamaForCausalLM:
    """The first layers alone, on the same weights: runs every kernel at a fraction of the time."""

    def make() -> LlamaForCausalLM:
        model = twin(context, "shallow")
        model.model.layers = model.model.layers[:_FIRST_LAYERS]
        model.config.num_hidden_layers = len(model.model.layers)
        return model

    return context.once("shallow", make)


def model_shape(tiny: bool, model: LlamaForCausalLM | None = None) -> ModelShape:
    """What policies plan by: of `model`, or of the run's whole one."""
    config = llama_config(tiny) if model is None else model.config
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads or heads
    return ModelShape(config.num_hidden_layers, heads, kv_heads, config.hidden_size // heads)


def patched(
    context: Context, variant: dict[str, Any], policy: str | Policy, budget: int | float
) -> LlamaForCausalLM:
    """The variant's twin under `sparsekv.patch(model, policy, budget, **variant)`.

    One twin for all policies and budgets, so that what is compiled for one serves the others.
    """
    model = twin(context, f"{sorted(variant.items())}")
    return sparsekv.patch(model, policy, budget, **variant)


def weight_bytes(model: LlamaForCausalLM) -> int:
    """Bytes of all parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())


def step_bytes(tiny: bool, itemsize: int, rows: int, slots: int) -> float:
    """Bytes that a decode step reads: all weights but the embedding, and K and V of its slots."""
    width, kv_width, layers = kv_shape(tiny)
    size = _TINY if tiny else _SIZE
    layer = 2 * width * (width + kv_width) + 3 * width * size["intermediate_size"]
    weights = layer * layers + width * size["vocab_size"]
    return float(itemsize) * (weights + 2 * layers * kv_width * rows * slots)


def kv_shape(tiny: bool) -> tuple[int, int, int]:
    """(hidden size, width of K of a token in a layer, layers)."""
    size = _TINY if tiny else _SIZE
    head_dim = size["hidden_size"] // size["num_attention_heads"]
    return size["hidden_size"], head_dim * size["num_key_value_heads"], size["num_hidden_layers"]


def prompt(context: Context, rows: int, tokens: int) -> Tensor:
    """Random token ids int64 [rows, tokens], without the special ones."""
    generator = torch.Generator(context.device).manual_seed(0)
    high = llama_config(context.tiny).vocab_size - 2
    return torch.randint(2, high, (rows, tokens), device=context.device, generator=generator)


class Clock(StoppingCriteria):
    """Notes the time when the given numbers of new tokens exist. It never stops anything.

    `generate` asks its stopping criteria once a token; only at a mark is the device waited for.
    """

    def __init__(self, marks: Sequence[int], rows: int, device: torch.device) -> None:
        self.marks, self.device = marks, device
        self.tokens, self.seconds = 0, [0.0] * 0
        self.go_on = torch.zeros(rows, dtype=torch.bool, device=device)

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """One more token; False for every row."""
        self.tokens += 1
        if self.tokens in self.marks:
            synchronize(self.device)
            self.seconds.append(time.perf_counter())
        return self.go_on


def generate(
    model: LlamaForCausalLM, ids: Tensor, marks: Sequence[int], **kwargs: Any
) -> tuple[list[float], Any]:
    """(milliseconds from the start to the first mark and between marks, what generate returned).

    Greedy unless kwargs say otherwise; the end-of-text token and the length are watched as always,
    and exactly marks[-1] tokens are made.
    """
    clock = Clock(marks, len(ids), ids.device)
    settings: dict[str, Any] = {"do_sample": False} | kwargs
    synchronize(ids.device)
    start = time.perf_counter()
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), min_new_tokens=marks[-1],
        max_new_tokens=marks[-1], stopping_criteria=StoppingCriteriaList([clock]), **settings,
    )  # fmt: skip
    times = [start, *clock.seconds]
    return [(after - before) * 1e3 for before, after in pairwise(times)], output


def token_ms(times: Sequence[float], marks: Sequence[int]) -> tuple[float, ...]:
    """Milliseconds a token between the marks, the time to the first mark left out."""
    return tuple(ms / (b - a) for ms, (a, b) in zip(times[1:], pairwise(marks), strict=True))
