"""One line of results: a question under a policy, a budget and a protocol, or a refusal."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

Protocol = Literal["question-aware", "question-agnostic"]
PROTOCOLS: tuple[Protocol, ...] = ("question-aware", "question-agnostic")

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Record:
    """What one question gave.

    budget: slots per layer and KV head, or the fraction kept; None for `full`. feed: see
    `sparsekv.evaluation.protocols`. settings: the policy's fields that are no defaults. headline:
    the metric of the task's tables.
    em: every answer token is the argmax. acc: the share that is. nll: mean over answer tokens, in
    nats. mc: the right choice has the largest summed log-likelihood. score: of a generated text,
    which is `text`. right_tokens of answer_tokens are the argmax.
    kept: tokens per layer and KV head after compression, mean. kv_bytes: measured, of this row;
    dense_kv_bytes: of a dense cache of the same tokens.
    prefill_ms, decode_ms: this item's share of its batch: reading and compressing its prompt, which
    in the question-aware protocol includes the whole context for each question; then what is fed.
    note: what must be known about the figures. refused: why there is no result; then example and
    question are "".
    """

    task: str
    policy: str
    budget: int | float | None
    protocol: str
    feed: str = "chunk"
    example: str = ""
    question: str = ""
    headline: str = ""
    control: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    seed: int = 0
    em: float | None = None
    acc: float | None = None
    nll: float | None = None
    mc: float | None = None
    score: float | None = None
    text: str | None = None
    right_tokens: int = 0
    answer_tokens: int = 0
    kept: float = 0.0
    kv_bytes: int = 0
    dense_kv_bytes: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    note: str | None = None
    refused: str | None = None

    @property
    def key(self) -> Key:
        """What makes a line unique in a run."""
        return (*self.cell, self.example, self.question)

    @property
    def cell(self) -> Key:
        """What a line of the table stands for: task, policy, budget, protocol."""
        return self.task, self.policy, self.budget, self.protocol

    @property
    def value(self) -> float | None:
        """The headline metric."""
        name = self.headline if self.headline in ("em", "acc", "nll", "mc") else "score"
        found: float | None = getattr(self, name)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values, ready for JSON; what is at its default is left out."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name in _REQUIRED or value != getattr(type(self), name, {})
        }

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Record:
        """The record that `to_dict` gave.

        Raises:
            ValueError: fields that a record does not have, or too few.
        """
        if not _REQUIRED <= plain.keys() <= _NAMES:
            raise ValueError(f"expected a record with fields of {sorted(_NAMES)}, got {plain}")
        return cls(**plain)


_REQUIRED = frozenset(("task", "policy", "budget", "protocol"))
_NAMES = frozenset(f.name for f in fields(Record))
