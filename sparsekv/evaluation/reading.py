"""A batch of contexts: read once, kept under every setting, asked its questions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from sparsekv.evaluation.answers import Answered
from sparsekv.evaluation.batches import Asked, Batch, agnostic_groups, aware_groups, by_length
from sparsekv.evaluation.conversation import Rows
from sparsekv.evaluation.plan import Plan
from sparsekv.evaluation.protocols import Prompt, compressed, fed, written
from sparsekv.evaluation.records import Record
from sparsekv.evaluation.settings import Setting
from sparsekv.hf.recording import Recording, extend, record

# A recording and the ms that reading one of its prompts took.
Tape = tuple[Recording, float]


class Reading:
    """Contexts are recorded when the first setting wants them, and forgotten with this object."""

    def __init__(self, plan: Plan, batch: Batch) -> None:
        self.plan, self.batch, self.subject = plan, batch, plan.subject
        self._whole: Tape | None = None
        # By policy; those of one are the same under all of its budgets.
        self._passes: dict[str, dict[Prompt, Tensor]] = {}

    def records(self) -> Iterator[list[Record]]:
        """What is due of both protocols, a list for each forward."""
        limits = self.plan.vocabulary, self.plan.batch_tokens
        for group in agnostic_groups(self.batch, *limits):
            yield from self._behind_contexts(group)
        for group in aware_groups(self.batch, *limits):
            yield from self._with_questions(group)

    def _behind_contexts(self, group: list[Asked]) -> Iterator[list[Record]]:
        first, last = group[0].place, group[-1].place + 1

        def tape() -> Tape:
            recording, ms = self._contexts()
            return recording.rows(first, last), ms

        prompts = [example.context for example in self.batch.examples[first:last]]
        rows = [(a, a.place - first) for a in group]
        yield from self._under_all(rows, prompts, tape, aware=False)

    def _with_questions(self, group: list[Asked]) -> Iterator[list[Record]]:
        made: list[Tape] = []

        def tape() -> Tape:
            if not made:
                made.append(self._extended(group))
            return made[0]

        rows = [(a, i) for i, a in enumerate(group)]
        yield from self._under_all(rows, [a.prompt for a in group], tape, aware=True)

    def _under_all(
        self,
        rows: list[tuple[Asked, int]],
        prompts: list[Prompt],
        tape: Callable[[], Tape],
        *,
        aware: bool,
    ) -> Iterator[list[Record]]:
        """rows: questions, each with the number of its prompt."""
        self._passes.clear()
        for setting in self.plan.settings:
            protocols = self.plan.due(setting, aware, [a for a, _ in rows])
            if not protocols:
                continue
            try:
                if setting.replays:
                    found = self._records(setting, rows, prompts, tape(), aware)
                else:
                    found = self._by_the_model(setting, rows, prompts, aware)
            except ValueError as error:
                yield self._refusals(setting, protocols, error)
                continue
            copies = [dataclasses.replace(x, protocol=name) for x in found for name in protocols]
            yield [copy for copy in copies if copy.key not in self.plan.done]

    def _by_the_model(
        self,
        setting: Setting,
        rows: list[tuple[Asked, int]],
        prompts: list[Prompt],
        aware: bool,
    ) -> list[Record]:
        """Without a recording; a policy that prunes gets prompts of one length together."""
        numbers = range(len(prompts))
        parts: Any = [list(numbers)]
        if setting.policy.prunes:
            parts = by_length(numbers, lambda i: len(prompts[i]))
        found = []
        for part in parts:
            own = [(a, part.index(i)) for a, i in rows if i in part]
            found += self._records(setting, own, [prompts[i] for i in part], None, aware)
        return found

    def _records(
        self,
        setting: Setting,
        rows: Sequence[tuple[Asked, int]],
        prompts: Sequence[Prompt],
        tape: Tape | None,
        aware: bool,
    ) -> list[Record]:
        recording, read_ms = tape or (None, 0.0)
        subject, task = self.subject, self.plan.task
        passes = self._passes.setdefault(setting.policy.name, {})
        after = compressed(subject, setting, prompts, recording, passes)
        asked, places = [a for a, _ in rows], [i for _, i in rows]
        started = subject.clock()
        if task.kind == "generated":
            texts = written(subject, setting, after.talk, asked, places, aware=aware)
            results = [self._text(text, a) for text, a in zip(texts, asked, strict=True)]
        else:
            answers = fed(subject, setting, after.talk, asked, places, aware=aware)
            results = [self._metrics(x, a) for x, a in zip(answers, asked, strict=True)]
        ms = (subject.clock() - started) * 1000 / len(asked)
        return [
            self._record(
                setting, example=a.example.id, question=a.question.id, kept=after.kept[i],
                kv_bytes=after.kv_bytes[i], dense_kv_bytes=after.dense_bytes[i], note=after.note,
                prefill_ms=read_ms + after.ms, decode_ms=ms, **result,
            )
            for (a, i), result in zip(rows, results, strict=True)
        ]  # fmt: skip

    def _record(self, setting: Setting, **more: Any) -> Record:
        task, policy = self.plan.task, setting.policy
        return Record(
            task.name, policy.name, setting.budget, more.pop("protocol", ""), setting.feed,
            headline=task.headline, control=task.control, settings=setting.changed,
            model=self.plan.model, seed=self.plan.seed, **more,
        )  # fmt: skip

    def _metrics(self, answers: Sequence[Answered], asked: Asked) -> dict[str, Any]:
        choice = self.plan.task.kind == "choice"
        right = answers[asked.question.right if choice else 0]
        best = min(range(len(answers)), key=lambda i: answers[i].nll)
        return {
            "em": float(right.right == right.tokens),
            "acc": right.right / right.tokens,
            "nll": right.nll / right.tokens,
            "mc": float(best == asked.question.right) if choice else None,
            "right_tokens": right.right,
            "answer_tokens": right.tokens,
        }

    def _text(self, text: str, asked: Asked) -> dict[str, Any]:
        score = self.plan.task.score
        assert score is not None  # `Task` has seen to it
        return {"text": text, "score": score(text, asked.question.references)}

    def _refusals(self, setting: Setting, protocols: list[str], error: ValueError) -> list[Record]:
        reason = " ".join(str(error).split())
        self.plan.refused |= {self.plan.cell(setting, protocol) for protocol in protocols}
        return [self._record(setting, protocol=name, refused=reason) for name in protocols]

    def _contexts(self) -> Tape:
        if self._whole is None:
            rows = self._rows([example.context for example in self.batch.examples])
            started = self.subject.clock()
            recording = record(self.subject.model, rows.ids, rows.positions(), rows.lengths)
            ms = (self.subject.clock() - started) * 1000 / len(rows.lengths)
            self._whole = recording, ms
        return self._whole

    def _extended(self, group: list[Asked]) -> Tape:
        """Contexts and questions in one piece; the ms include the whole context for each."""
        whole, ms = self._contexts()
        rows, places = self._rows([a.question.prompt[:-1] for a in group]), [a.place for a in group]
        started = self.subject.clock()
        positions = rows.positions(whole.lengths[places])
        recording = extend(self.subject.model, whole, places, rows.ids, positions, rows.lengths)
        return recording, ms + (self.subject.clock() - started) * 1000 / len(group)

    def _rows(self, tokens: Sequence[Sequence[int]]) -> Rows:
        return Rows.of(tokens, self.subject.pad, self.subject.model.device)
