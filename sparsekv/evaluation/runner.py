"""`evaluate`: one task under one policy, budget and protocol."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import sparsekv
from sparsekv.evaluation.example import Example, Question, Task
from sparsekv.evaluation.records import PROTOCOLS, Record
from sparsekv.hf.compat import cache_key
from sparsekv.policies import Policy, get_policy

_Row = tuple[Example, Question, int]  # which answer


@torch.no_grad()
def evaluate(
    model: Any,
    tokenizer: Any,
    task: Task,
    policy: str | Policy,
    budget: int | float,
    protocol: str,
    *,
    batch_tokens: int = 8192,
    model_name: str = "",
    seed: int = 0,
) -> list[Record]:
    """One record a question; the model stays patched.

    Raises:
        ValueError: an unknown protocol, or what `sparsekv.patch` and the policy refuse.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"expected a protocol of {', '.join(PROTOCOLS)}, got {protocol!r}")
    chosen = get_policy(policy).with_tokenizer(tokenizer)
    sparsekv.patch(model, chosen, budget)
    found: list[Record] = []
    for rows in _batches(task.examples, protocol, batch_tokens):
        found += _run(model, tokenizer, task, rows, protocol, chosen, budget)
    return found


def _batches(examples: Iterable[Example], protocol: str, limit: int) -> Iterator[list[_Row]]:
    batch: list[_Row] = []
    used = 0
    for example in sorted(examples, key=lambda e: len(e.context)):
        rows = [(example, q, a) for q in example.questions for a in range(max(len(q.answers), 1))]
        cost = len(example.context) * (len(rows) if protocol == "question-aware" else 1)
        if batch and used + cost > limit:
            yield batch
            batch, used = [], 0
        batch, used = batch + rows, used + cost
    yield batch


def _padded(rows: Sequence[Sequence[int]], pad: int, device: Any) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = [[pad] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _run(
    model: Any,
    tokenizer: Any,
    task: Task,
    rows: list[_Row],
    protocol: str,
    policy: Policy,
    budget: int | float,
) -> list[Record]:
    agnostic = protocol == "question-agnostic"
    cut = 0 if agnostic else -1
    if agnostic:
        contexts = list({id(e): e.context for e, _, _ in rows}.values())
        order = {id(e): i for i, e in enumerate({id(e): e for e, _, _ in rows}.values())}
        places = [order[id(e)] for e, _, _ in rows]
    else:
        contexts = [e.context + q.prompt[:-1] for e, q, _ in rows]
        places = list(range(len(rows)))
    ids, mask = _padded(contexts, tokenizer.pad_token_id or 0, model.device)
    cache = sparsekv.new_cache(model)
    started = time.perf_counter()
    model(
        input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0),
        logits_to_keep=1, use_cache=True, **{cache_key(model): cache},
    )  # fmt: skip
    if policy.extra_passes:
        sparsekv.compress(model, cache, ids, mask)
    report, share = cache.report(), 1000 / len(contexts)
    ended = time.perf_counter()
    cache.state.select_rows(torch.tensor(places).numpy())
    cache.state.chunked_until = 1 << 30  # one token is a question, not a step
    fed = [q.prompt[cut:] + (q.answers[a][:-1] if q.answers else ()) for _, q, a in rows]
    more, more_mask = _padded(fed, tokenizer.pad_token_id or 0, model.device)
    whole = torch.cat([mask[places], more_mask], 1)
    answers = [q.answers[a] for _, q, a in rows]
    longest = max(map(len, answers))
    logits = model(
        input_ids=more, attention_mask=whole,
        position_ids=(whole.cumsum(-1) - 1).clamp_min(0)[:, ids.shape[1] :],
        logits_to_keep=longest, use_cache=True, **{cache_key(model): cache},
    ).logits.float()  # fmt: skip
    targets, real = _padded(answers, 0, model.device)
    nll = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0] * real
    right = (logits.argmax(-1) == targets) & real.bool()
    both = torch.stack([nll.sum(1), right.sum(1).float()]).tolist()
    step_ms = (time.perf_counter() - ended) * 1000 / len(rows)
    found: dict[tuple, list[tuple[float, int, int]]] = {}
    asked: dict[tuple, tuple[Example, Question]] = {}
    for (e, q, _), loss, hits, answer in zip(rows, *both, answers, strict=True):
        found.setdefault((e.id, q.id), []).append((loss, int(hits), len(answer)))
        asked[e.id, q.id] = (e, q)
    records = []
    for key, per in found.items():
        e, q = asked[key]
        chosen = q.right if task.kind == "choice" else 0
        loss, hits, count = per[chosen]
        records.append(
            Record(
                task.name, policy.name, budget, protocol, e.id, q.id, task.headline, task.control,
                em=float(hits == count), acc=hits / count, nll=loss / count,
                mc=float(min(per)[0] == loss) if task.kind == "choice" else None,
                right_tokens=hits, answer_tokens=count, kept=report.kept.mean,
                kv_bytes=report.kv_bytes // len(contexts),
                dense_kv_bytes=report.dense_bytes // len(contexts),
                prefill_ms=(ended - started) * share, decode_ms=step_ms,
            )
        )  # fmt: skip
    return records
