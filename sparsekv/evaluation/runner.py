"""`run` a plan; `evaluate` one task under one policy, budget and protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sparsekv.evaluation.batches import batches
from sparsekv.evaluation.example import Task
from sparsekv.evaluation.plan import Plan
from sparsekv.evaluation.protocols import Subject
from sparsekv.evaluation.reading import Reading
from sparsekv.evaluation.records import PROTOCOLS, Record
from sparsekv.evaluation.settings import Feed, admit
from sparsekv.policies import Policy, get_policy

# Tokens of one forward on a CPU, and the most by default on a GPU.
_CPU_TOKENS, _GPU_TOKENS = 8192, 131072
# Of the free memory of a GPU, how much recordings may take; two are held, of a batch each.
_SHARE, _HELD = 1 / 3, 2


def default_batch_tokens(model: Any) -> int:
    """By the device of the model, and on a GPU by the memory that is free: a power of two."""
    if model.device.type != "cuda":
        return _CPU_TOKENS
    free, _ = torch.cuda.mem_get_info(model.device)
    fit = int(free * _SHARE / (_HELD * recorded_bytes(model.config, model.dtype)))
    return min(_GPU_TOKENS, 1 << max(fit.bit_length() - 1, 10))


def recorded_bytes(config: Any, dtype: torch.dtype) -> int:
    """Of q, k and v of one token in all layers."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return (heads + 2 * kv_heads) * dim * config.num_hidden_layers * dtype.itemsize


def evaluate(
    model: Any,
    tokenizer: Any,
    task: Task,
    policy: str | Policy,
    budget: int | float,
    protocol: str,
    *,
    batch_tokens: int | None = None,
    feed: Feed = "chunk",
    model_name: str = "",
    seed: int = 0,
) -> list[Record]:
    """One record a question, and one that says why if the policy refuses the task.

    The model stays patched. batch_tokens: most tokens of one forward; None: by the device.

    Raises:
        ValueError: an unknown policy or protocol, or what `sparsekv.patch` refuses.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"expected a protocol of {', '.join(PROTOCOLS)}, got {protocol!r}")
    settings = admit(model, get_policy(policy).with_tokenizer(tokenizer), [budget], feed)
    tokens = batch_tokens or default_batch_tokens(model)
    subject = Subject(model, tokenizer, task)
    plan = Plan(subject, settings, [protocol], tokens, model=model_name, seed=seed)
    return [record for records in run(plan) for record in records]


@torch.no_grad()
def run(plan: Plan) -> Iterator[list[Record]]:
    """The records of a plan that are not done, as they come: a list for each forward.

    A refusal is one record, and ends its cell.
    """
    for batch in batches(plan.task, plan.batch_tokens):
        yield from Reading(plan, batch).records()
