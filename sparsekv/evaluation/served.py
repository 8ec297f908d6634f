"""Questions asked of a running server, whatever it keeps of its caches.

A server samples the first token while it still holds the whole prompt. So of a question with a
fixed answer the last token is left to the model: context and question but that token are the
prompt, and the answer counts if greedy decoding says the token and then the answer. This is the
question-aware protocol with feed="steps", but for the token that the model must know; a dense
server is judged in the same way. Generated texts are scored as they are: their first token has seen
everything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

from sparsekv.completions import Server
from sparsekv.evaluation.example import Task
from sparsekv.evaluation.records import Key, Protocol, Record
from sparsekv.evaluation.settings import Feed

PROTOCOL: Protocol = "question-aware"
FEED: Feed = "steps"


@dataclass(frozen=True)
class Ask:
    """A question: what is sent, and of a fixed answer the tokens wanted; most: tokens to be made.

    references: of a generated text.
    """

    example: str
    question: str
    prompt: tuple[int, ...]
    wanted: tuple[int, ...]
    most: int
    references: tuple[str, ...] = ()


@dataclass(frozen=True)
class Served:
    """What stands in every record: the policy and the budget that the server was started with."""

    policy: str
    budget: int | float | None
    model: str
    seed: int


def check_task(task: Task) -> None:
    """ValueError unless a server's text can be scored: likelihoods are of answers that are fed."""
    fixed = task.kind == "forced" and task.headline == "em"
    if not fixed and task.kind != "generated":
        raise ValueError(
            f"expected tasks scored by em or by generated text for a server, got {task.name}, "
            f"scored by {task.headline}"
        )


def asks(task: Task) -> list[Ask]:
    """The questions of a task. ValueError for one that a server cannot be asked."""
    check_task(task)
    found = []
    for example in task.examples:
        for question in example.questions:
            prompt: tuple[int, ...] = (*example.context, *question.prompt)
            wanted: tuple[int, ...] = ()
            if task.kind == "forced":
                prompt, wanted = prompt[:-1], (prompt[-1], *question.answers[0])
            most = len(wanted) or task.max_new_tokens
            about = (example.id, question.id, prompt, wanted, most, question.references)
            found.append(Ask(*about))
    return found


async def answered(
    server: Server, task: Task, served: Served, done: Iterable[Key], concurrency: int
) -> AsyncIterator[Record]:
    """Records of what is not done yet, as the answers come; `concurrency` requests at a time.

    decode_ms is the time that a request took.
    """
    known, gate = set(done), asyncio.Semaphore(concurrency)

    async def one(ask: Ask) -> Record:
        async with gate:
            began = time.monotonic()
            more = {"ignore_eos": True} if ask.wanted else {}
            said = await server.complete(ask.prompt, ask.most, **more)
            ms = (time.monotonic() - began) * 1000
        return _record(task, served, ask, said.ids, said.text, ms)

    todo = [a for a in asks(task) if _empty(task, served, a).key not in known]
    running = [asyncio.ensure_future(one(ask)) for ask in todo]
    try:
        for next_one in asyncio.as_completed(running):
            yield await next_one
    finally:
        for request in running:
            request.cancel()


def _record(task: Task, served: Served, ask: Ask, ids: list[int], text: str, ms: float) -> Record:
    if task.kind == "generated":
        assert task.score is not None
        score = task.score(text, ask.references)
        return _empty(task, served, ask, text=text, score=score, decode_ms=ms)
    same = [a == b for a, b in zip(ids, ask.wanted, strict=False)]
    right = same.index(False) if False in same else len(same)
    return _empty(
        task, served, ask, em=float(right == len(ask.wanted)), right_tokens=right,
        answer_tokens=len(ask.wanted), decode_ms=ms,
    )  # fmt: skip


def _empty(task: Task, served: Served, ask: Ask, **more: Any) -> Record:
    return Record(
        task.name, served.policy, served.budget, PROTOCOL, FEED, ask.example, ask.question,
        task.headline, task.control, model=served.model, seed=served.seed, **more,
    )  # fmt: skip
