"""What the model says to answers that it is fed, and what it generates itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekv.evaluation.conversation import Conversation

# Steps between two looks at whether every row has ended: a look waits for the device.
_LOOK = 8
# Logits that exist in fp32 at a time.
_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Answered:
    """nll: summed over the tokens of an answer, in nats. right: how many are the argmax."""

    nll: float
    right: int
    tokens: int


def judged(logits: Tensor, answers: Sequence[Sequence[int]]) -> list[Answered]:
    """What logits [R, n, V] say to one answer a row, of at most n tokens, whose own logits end in
    the last column: each column is of the token before. ValueError for NaN."""
    targets = [[-1] * (logits.shape[1] - len(answer)) + list(answer) for answer in answers]
    return _counted(*_compared(logits, torch.tensor(targets, device=logits.device)), answers)


def fed_by_step(
    talk: Conversation, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[Answered]:
    """Prompts, of at least one token, and answers as decode steps. Rows that have ended are fed on;
    nobody looks at them. ValueError for logits that are NaN."""
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [talk.pad] * (width - len(row)) for row in rows])
    first = torch.tensor([[len(prompt)] for prompt in prompts])
    ends = torch.tensor([[len(row)] for row in rows])
    column = torch.arange(width)
    targets = torch.where((column >= first) & (column < ends), ids, -1)
    device = talk.cache.state.layers[0].device
    ids, targets = ids.to(device), targets.to(device)
    losses, hits = (torch.zeros(len(rows), dtype=torch.float64, device=device) for _ in range(2))
    for i in range(width - 1):
        nll, right = _compared(talk.step(ids[:, i])[:, None], targets[:, i + 1 : i + 2])
        losses, hits = losses + nll, hits + right
    return _counted(losses, hits, answers)


def generated(
    talk: Conversation,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    ends: Sequence[int],
    *,
    by_step: bool,
) -> list[list[int]]:
    """Greedy tokens of each row, up to one of `ends`, which is left out.

    by_step: feed the prompts as decode steps, too. A row whose prompt ends first goes first.

    Raises:
        ValueError: logits that are NaN.
    """
    starts = [len(prompt) if by_step else 0 for prompt in prompts]
    if by_step:
        rows = [[*prompt, *[talk.pad] * (max(starts) - len(prompt))] for prompt in prompts]
        known = torch.tensor(rows, device=talk.cache.state.layers[0].device)
        nan = torch.zeros((), dtype=torch.bool, device=known.device)
    else:
        logits = talk.chunk(prompts, 1)[:, 0]
        known = logits.argmax(-1, keepdim=True)
        nan = logits.gather(-1, known).isnan().any()
    first, stops = (
        torch.tensor(list(x), dtype=torch.int64, device=known.device) for x in (starts, ends)
    )
    columns = [known[:, 0]]
    ended = torch.isin(columns[0], stops) & (first == 0)
    for i in range(1, max(starts) + max_new_tokens):
        if i % _LOOK == 0 and bool(ended.all()):
            break
        logits = talk.step(columns[-1])
        column = logits.argmax(-1)
        nan = nan | logits.gather(-1, column[:, None]).isnan().any()
        if i < known.shape[1]:
            column = torch.where(i < first, known[:, i], column)
        columns.append(column)
        ended = ended | (torch.isin(column, stops) & (i >= first))
    _check_numbers(bool(nan))
    texts = torch.stack(columns, 1).tolist()
    return [
        _until(text[start : start + max_new_tokens], set(ends))
        for text, start in zip(texts, starts, strict=True)
    ]


def _check_numbers(nan: bool) -> None:
    """ValueError for NaN logits, whose argmax is some token: they would pass for wrong answers."""
    if nan:
        raise ValueError(
            "expected numbers as logits, got NaN: does the model overflow in its dtype?"
        )


def _until(row: list[int], ends: set[int]) -> list[int]:
    for i, token in enumerate(row):
        if token in ends:
            return row[:i]
    return row


def _compared(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Summed NLL and number of right argmaxes, fp64 [R]; logits [R, n, V], targets [R, n] or -1."""
    real = targets >= 0
    safe = targets.clamp_min(0)
    chosen = logits.gather(-1, safe[..., None])[..., 0].float()
    rows = max(_ELEMENTS // logits[0].numel(), 1)
    total = torch.cat([some.float().logsumexp(-1) for some in logits.split(rows)])
    nll = ((total - chosen) * real).double().sum(1)
    right = ((logits.argmax(-1) == safe) & real).double().sum(1)
    return nll, right


def _counted(nll: Tensor, right: Tensor, answers: Sequence[Sequence[int]]) -> list[Answered]:
    losses, hits = torch.stack([nll, right]).tolist()
    _check_numbers(any(map(math.isnan, losses)))
    return [
        Answered(loss, int(count), len(answer))
        for loss, count, answer in zip(losses, hits, answers, strict=True)
    ]
