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

# Tokens of one forward, by the kind of device.
BATCH_TOKENS = {"cpu": 8192, "cuda": 131072}


def default_batch_tokens(model: Any) -> int:
    """By the device of the model."""
    return BATCH_TOKENS.get(model.device.type, BATCH_TOKENS["cpu"])


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
