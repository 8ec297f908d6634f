"""KVzip: keep what the model needs to repeat its context (arXiv 2505.23416).

The prompt is cached whole. Then, for each chunk c of `chunk` context tokens, the model is fed

    the request to repeat the context (from the last 8 tokens of the chunk before on), the end of a
    user's turn in the chat template, and the tokens of the chunk themselves

m tokens that attend everything and are not stored. In each layer their queries are scored by a
softmax over fewer keys, the sinks, the chunk and the m tokens up to each query:

    score_j = max over the m queries and the query heads of the group of p_ij,  j in c  [L, HK, T]

With all chunks scored, L * HK * budget of the L * HK * T keys stay: the best of all layers and
heads together (ties: the newest token, then the first layer and head), or `uniform`, the best
`budget` of each head. The first `sinks` tokens stay in every head. A head may be left with these
only; later turns and generated tokens always stay. The cache serves any question about its context:
nothing was scored by the question.

The passes cost about two further prefills. They need the tokenizer, and its chat template matters:
without it the published scores fall far. `chunk` is the paper's, sinks=4 is kvpress's (the official
code keeps the system prompt). Not reproduced: the official threshold keeps one key fewer than asked
and drops ties, its softmax is in bf16; kvpress never scores the head of the chat template, and asks
for later chunks without the space after "starting with".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from sparsekv.policies._facts import Facts
from sparsekv.policies.base import LayerPlan, ModelShape, Policy, Stats, flag, positive

_FIRST = "\n\nRepeat the previous context exactly."
_NEXT = "\n\nRepeat the part of the previous context exactly, starting with "
_CUE = 8  # tokens of the chunk before that say where to start
_CONTENT = "@content@"


@dataclass(frozen=True)
class Repeat:
    """One extra pass: `ids` follow the context; tokens start .. stop - 1 of it are scored."""

    ids: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class KVzip(Policy):
    """Context reconstruction over chunks of `chunk` tokens; a tokenizer is needed to run."""

    tokenizer: Any = field(default=None, repr=False)
    chunk: int = 2000
    uniform: bool = False
    sinks: int = 4

    name: ClassVar[str] = "kvzip"
    keeps: ClassVar[str] = "what the model attends when it repeats its context, over all layers"
    paper: ClassVar[str] = "KVzip, arXiv 2505.23416"
    facts: ClassVar[Facts] = Facts(
        protects="the first `sinks` tokens; later turns and generated tokens",
        budget="C a KV head on average over all layers and heads; with `uniform` C in each",
        acts="once, after the passes that follow the prompt",
        flops="the prompt's linear layers once more, 4 T^2 D HQ of attention over the whole cache "
        "and about 8 chunk T D HQ over sinks, chunk and pass, twice with the scores",
        bytes="K and V of the prompt gathered and read once a pass, 4 T HK of scores",
    )
    extra_passes: ClassVar[bool] = True
    refuses: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"assisted": "the first drafts come in one forward with the context that is to be repeated"}
    )
    tensor_parallel: ClassVar[Literal["local", "refused"]] = "refused"

    def __post_init__(self) -> None:
        positive("chunk", self.chunk)
        positive("sinks", self.sinks, at_least=0)
        flag("uniform", self.uniform)

    def ready(self) -> None:
        if self.tokenizer is None:
            raise ValueError(
                "expected a tokenizer for policy 'kvzip', got None: KVzip(tokenizer=tokenizer)"
            )

    def with_tokenizer(self, tokenizer: Any) -> KVzip:
        return self if self.tokenizer is not None else replace(self, tokenizer=tokenizer)

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        return (LayerPlan(None),) * shape.num_layers  # the budget applies after the passes

    def score(self, layer: int, stats: Stats) -> Tensor:
        return torch.zeros_like(stats.positions, dtype=torch.float32)  # a prompt drops nothing

    def repeats(self, context: Sequence[int]) -> tuple[Repeat, ...]:
        """The passes over a context of token ids; sinks are not scored."""
        self.ready()
        suffix = self._turn_end()
        passes: list[Repeat] = []
        for start in range(min(self.sinks, len(context)), len(context), self.chunk):
            stop = min(start + self.chunk, len(context))
            first = not passes
            cue = [] if first else context[max(0, start - _CUE) : start]
            request = self._encode(_FIRST if first else _NEXT)
            ids = (*request, *cue, *suffix, *context[start:stop])
            passes.append(Repeat(tuple(int(i) for i in ids), start, stop))
        return tuple(passes)

    def _turn_end(self) -> list[int]:
        """What the chat template puts between a user's text and the answer; () without one."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            return []
        turn = [{"role": "user", "content": _CONTENT}]
        text = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return self._encode(text.rsplit(_CONTENT, 1)[-1])

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
