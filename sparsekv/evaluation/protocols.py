"""The two protocols, for one setting and a group of questions.

question-agnostic   The context is compressed. Each question is fed to a copy of that cache.
question-aware      Context and question, but its last token, are compressed, and then the last
                    token is fed.

"Fed" means, with feed="chunk": what is left of the question and the answer come in one forward,
which attends everything that was kept and itself, causally. So all answers of a context cost one
forward, and a policy shows what its choice among the prompt's tokens is worth; what it would drop
later, while it decodes, it does not get to drop. With feed="steps" a question's last token and its
answer come as decode steps, so policies that drop at every step do, and `em` is what greedy
decoding would have emitted; before them the rest of a question comes as a chunk that the policy
acts upon. Two kinds of policies are always fed by steps: quest, whose chunks attend everything, and
pyramidinfer, which takes no chunk, so that it gets whole questions by step.

A generated answer is decoded by steps in any case.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sparsekv
from sparsekv.evaluation.answers import Answered, fed_by_step, generated, judged
from sparsekv.evaluation.batches import Asked
from sparsekv.evaluation.conversation import Conversation, Rows
from sparsekv.evaluation.example import Task
from sparsekv.evaluation.settings import Setting
from sparsekv.hf.asking import Asking, askable
from sparsekv.hf.recording import Recording, replay
from sparsekv.policies import PyramidInfer, resolve_budget

Prompt = tuple[int, ...]
# Tokens that questions must have in common for a forward of their own.
_WORTH = 16


@dataclass(frozen=True)
class Subject:
    """A task and the patched model that is to do it. pad: a token id; ends: those that end text."""

    model: Any
    tokenizer: Any
    task: Task

    @cached_property
    def pad(self) -> int:
        """A token id that fills rows up."""
        return int(getattr(self.tokenizer, "pad_token_id", None) or 0)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Token ids that end a generated text."""
        own = getattr(self.model.generation_config, "eos_token_id", None)
        every = [*(own if isinstance(own, list) else [own]), self.tokenizer.eos_token_id]
        return tuple({int(i) for i in every if i is not None})

    @cached_property
    def has_short_question(self) -> bool:
        """Whether a question is a single token, which leaves nothing to be fed before it."""
        return min(self._question_lengths) < 2

    @cached_property
    def has_only_short_questions(self) -> bool:
        """Whether all of them are single tokens."""
        return max(self._question_lengths) < 2

    @cached_property
    def _question_lengths(self) -> list[int]:
        return [len(q.prompt) for example in self.task.examples for q in example.questions]

    def clock(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


@dataclass(frozen=True)
class Compressed:
    """Prompts in a cache after compression; figures by prompt.

    kept: tokens per layer and KV head, mean. kv_bytes: measured; dense_bytes: of a dense cache.
    ms: what compression took, by prompt, without the forward that a recording saves.
    """

    talk: Conversation
    kept: list[float]
    kv_bytes: list[int]
    dense_bytes: list[int]
    ms: float
    note: str | None


def compressed(
    subject: Subject,
    setting: Setting,
    prompts: Sequence[Prompt],
    recording: Recording | None,
    passes: dict[Prompt, Tensor],
) -> Compressed:
    """Compress prompts, all of one length if the policy prunes.

    recording: of just these, or None. passes: what extra passes of this policy over prompts have
    found, under other budgets; it grows.

    Raises:
        ValueError: what the policy refuses.
    """
    model, started = subject.model, subject.clock()
    budget, note = _budget(setting, len(prompts[0]), model)
    cache = setting.new_cache(model, budget)
    talk = Conversation(model, cache, subject.pad)
    width = recording.columns if recording is not None else 1
    rows = Rows.of(prompts, subject.pad, model.device, width)
    if recording is not None and setting.replays:
        replay(recording, cache)
        talk.read(rows)
    else:
        with setting.on(model):
            talk.prefill(rows)
    if setting.policy.extra_passes:
        sparsekv.compress(model, cache, rows.ids, rows.mask, found=passes)
    ms = (subject.clock() - started) * 1000 / len(prompts)
    kept, held, dense = _measured(cache)
    return Compressed(talk, kept, held, dense, ms, note or setting.policy.note)


def fed(
    subject: Subject,
    setting: Setting,
    talk: Conversation,
    asked: Sequence[Asked],
    places: Sequence[int],
    *,
    aware: bool,
) -> list[list[Answered]]:
    """What the model says to each answer of each question.

    places: the row of each question, ascending. aware: all of the questions but their last tokens
    is in the cache.
    """
    rests = [a.question.prompt[-1:] if aware else a.question.prompt for a in asked]
    pairs = [(i, answer) for i, a in enumerate(asked) for answer in a.answers]
    answers = [answer for _, answer in pairs]
    if setting.feed == "steps":
        found = _by_step(subject, setting, talk, rests, places, pairs)
    elif askable(talk.cache):
        found = judged(_asked(subject, talk.cache, rests, places, pairs), answers)
    else:
        talk.fork([places[i] for i, _ in pairs])
        width = max(map(len, answers))
        logits = talk.chunk([(*rests[i], *answer[:-1]) for i, answer in pairs], width)
        found = judged(logits, answers)
    rest = iter(found)
    return [[next(rest) for _ in a.answers] for a in asked]


def _asked(
    subject: Subject,
    cache: sparsekv.SparseCache,
    rests: Sequence[Prompt],
    places: Sequence[int],
    pairs: Sequence[tuple[int, Prompt]],
) -> Tensor:
    """Logits of every answer. What questions to a row begin with, and what several answers to a
    question share, is fed once."""
    asking, device = Asking(subject.model, cache), subject.model.device

    def remember(rows: Sequence[Prompt], of: Sequence[int]) -> None:
        fed = Rows.of(rows, subject.pad, device)
        asking.ask(of, fed.ids, fed.lengths, 1, remember=True)

    starts = _common(rests, places)
    if min(map(len, starts.values())) >= _WORTH:
        remember(list(starts.values()), list(starts))
        rests = [rest[len(starts[i]) :] for rest, i in zip(rests, places, strict=True)]
        places = np.unique(places, return_inverse=True)[1].tolist()
    if len(pairs) > len(rests) and min(map(len, rests)) > 1:
        remember([rest[:-1] for rest in rests], places)
        rests, places = [rest[-1:] for rest in rests], range(len(rests))
    rows = Rows.of([(*rests[i], *answer[:-1]) for i, answer in pairs], subject.pad, device)
    width = max(len(answer) for _, answer in pairs)
    return asking.ask([places[i] for i, _ in pairs], rows.ids, rows.lengths, width)


def _common(rests: Sequence[Prompt], places: Sequence[int]) -> dict[int, Prompt]:
    """By row, ascending: what all its questions begin with, less than any of them; a row with one
    question has nothing in common with others."""
    groups: dict[int, list[Prompt]] = {}
    for rest, place in zip(rests, places, strict=True):
        groups.setdefault(place, []).append(rest)
    found = {}
    for place, group in groups.items():
        first, last = min(group), max(group)  # they differ first where any two do
        most = min(map(len, group)) - 1 if len(group) > 1 else 0
        same = next((i for i in range(most) if first[i] != last[i]), most)
        found[place] = first[:same]
    return found


def _by_step(
    subject: Subject,
    setting: Setting,
    talk: Conversation,
    rests: Sequence[Prompt],
    places: Sequence[int],
    pairs: Sequence[tuple[int, Prompt]],
) -> list[Answered]:
    """Last tokens and answers as decode steps; what comes before them as a chunk, if it may."""
    if not (setting.policy.prunes or subject.has_short_question) and len(rests[0]) > 1:
        talk.fork(places)
        talk.chunk([rest[:-1] for rest in rests], 1)
        rests, places = [rest[-1:] for rest in rests], range(len(rests))
    talk.fork([places[i] for i, _ in pairs])
    return fed_by_step(talk, [rests[i] for i, _ in pairs], [answer for _, answer in pairs])


def written(
    subject: Subject,
    setting: Setting,
    talk: Conversation,
    asked: Sequence[Asked],
    places: Sequence[int],
    *,
    aware: bool,
) -> list[str]:
    """What the model generates to each question; see `fed`."""
    rests = [a.question.prompt[-1:] if aware else a.question.prompt for a in asked]
    talk.fork(places)
    by_step = aware or setting.policy.prunes
    tokens = generated(
        talk, rests, subject.task.max_new_tokens, subject.ends, by_step=by_step
    )  # fmt: skip
    return [subject.tokenizer.decode(row, skip_special_tokens=True) for row in tokens]


def _budget(setting: Setting, tokens: int, model: Any) -> tuple[int | float | None, str | None]:
    """The budget to run with, and what to say if it is not the setting's: pyramidinfer's tail alone
    may be larger, then the smallest budget that it takes is used."""
    policy, budget = setting.policy, setting.budget
    if not isinstance(policy, PyramidInfer) or budget is None:
        return budget, None
    layers = model.config.num_hidden_layers
    asked = resolve_budget(budget, tokens)
    low, high = asked, max(tokens, asked)  # a budget of all tokens is always taken
    while low < high:
        middle = (low + high) // 2
        try:
            policy.layer_tokens(layers, tokens, middle)
            high = middle
        except ValueError:
            low = middle + 1
    note = f"run with the least budget for {tokens} tokens, {low}" if low > asked else None
    return (low if note else budget), note


def _measured(cache: sparsekv.SparseCache) -> tuple[list[float], list[int], list[int]]:
    """Kept tokens, KV bytes and those of a dense cache, by row."""
    state = cache.state
    kept, held, dense = (np.zeros(len(state.tokens)) for _ in range(3))
    heads = 0
    for store in state.stores:
        pool, pages = store.pool, store.pages.sum((0, 2))
        kept += store.lens.sum((0, 2))
        heads += store.lens.shape[0] * store.lens.shape[2]
        held += pool.kv_bytes * pages / pages.sum()
        for layer in state.members(store):
            window = state.layers[layer].window
            tokens = state.tokens if window is None else np.minimum(state.tokens, window - 1)
            dense += tokens * store.lens.shape[2] * 2 * pool.head_dim * pool.dtype.itemsize
    return (kept / heads).tolist(), held.round().astype(int).tolist(), dense.astype(int).tolist()
