"""Which contexts and continuations go through the model together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Wanted:
    """The log-likelihood of a continuation after a context, both in token ids."""

    number: int
    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Contexts, rows that go on from them, and what is read off the rows.

    contexts: all of one token, or all of more. context_of: for each row, its context. fed: for each
    row, the tokens between context and last answer token. wanted, row_of: what is scored, and on
    which row: continuations that differ in the last token only share one.
    """

    contexts: tuple[tuple[int, ...], ...]
    context_of: tuple[int, ...]
    fed: tuple[tuple[int, ...], ...]
    wanted: tuple[Wanted, ...]
    row_of: tuple[int, ...]

    def targets(self) -> tuple[Tensor, Tensor]:
        """Token to score, int64 [steps, N], and whether there is one, bool [steps, N]."""
        steps = max(len(one.continuation) for one in self.wanted)
        targets = torch.zeros(steps, len(self.wanted), dtype=torch.long)
        real = torch.zeros(steps, len(self.wanted), dtype=torch.bool)
        for i, one in enumerate(self.wanted):
            targets[: len(one.continuation), i] = torch.tensor(one.continuation)
            real[: len(one.continuation), i] = True
        return targets, real


def make_batches(wanted: Sequence[Wanted], size: int, *, alike: bool) -> Iterator[Batch]:
    """Batches of up to `size` rows (more, if one context alone has more), long contexts first.

    alike: contexts of one length only, for policies that allow no padding.
    """
    by_context: dict[tuple[int, ...], list[Wanted]] = {}
    for one in wanted:
        by_context.setdefault(one.context, []).append(one)
    waiting: list[tuple[int, ...]] = []
    rows = 0
    for context in sorted(by_context, key=lambda context: (-len(context), context)):
        more = len({one.continuation[:-1] for one in by_context[context]})
        other = waiting and (len(waiting[-1]) == 1) != (len(context) == 1)
        other = other or (alike and waiting and len(waiting[-1]) != len(context))
        if waiting and (rows + more > size or other):
            yield _batch(waiting, by_context)
            waiting, rows = [], 0
        waiting.append(context)
        rows += more
    if waiting:
        yield _batch(waiting, by_context)


def _batch(
    contexts: Sequence[tuple[int, ...]], by_context: dict[tuple[int, ...], list[Wanted]]
) -> Batch:
    rows: dict[tuple[int, tuple[int, ...]], int] = {}
    found: list[Wanted] = []
    row_of: list[int] = []
    for i, context in enumerate(contexts):
        for one in by_context[context]:
            found.append(one)
            row_of.append(rows.setdefault((i, one.continuation[:-1]), len(rows)))
    return Batch(
        tuple(contexts), tuple(i for i, _ in rows), tuple(fed for _, fed in rows),
        tuple(found), tuple(row_of),
    )  # fmt: skip
