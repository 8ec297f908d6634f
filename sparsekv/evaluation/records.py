"""One line of results: a question under a policy, a budget and a protocol, or a refusal."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Protocol = Literal["question-aware", "question-agnostic"]
PROTOCOLS: tuple[Protocol, ...] = ("question-aware", "question-agnostic")


@dataclass(frozen=True)
class Record:
    """What one question gave.

    settings: the policy's fields. budget: slots per layer and KV head, or the fraction kept; None
    for `full`. headline: the metric of the task.
    em: every answer token is the argmax. acc: the share that is. nll: mean over answer tokens, in
    nats. mc: the right choice has the largest log-likelihood. score: of a generated text, which is
    `text`. right_tokens of answer_tokens are the argmax.
    kept: tokens per layer and KV head after compression, mean. kv_bytes: measured, of this row's
    share of the cache; dense_kv_bytes: of a dense cache for the same tokens.
    prefill_ms, decode_ms: this item's share of its batch.
    refused: why there is no result; then example and question are "".
    """

    task: str
    policy: str
    budget: int | float | None
    protocol: str
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
    def key(self) -> tuple:
        """What makes a line unique."""
        return self.task, self.policy, self.budget, self.protocol, self.example, self.question

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values, ready for JSON."""
        return asdict(self)
