"""Evict once, after the prompt, or at every step: what is better at equal memory?

    python experiments/decode_time.py --data DIR --out OUT

The true continuation of a text is fed token by token and scored. A policy that acts at decode
time holds its budget C all along. Its twin acts on the prompt only and appends: it starts with C
less half of the steps, so that both hold C tokens on average (the twin ends with more, and begins
with less).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from experiment import Experiment, main
from outcome import Row
from torch import Tensor
from units import Arm, Options, Session, Unit, key_of

import sparsekv
from sparsekv.evaluation.texts import PROSE, passages
from sparsekv.hf.compat import cache_key
from sparsekv.policies import H2O, TOVA, LayerPlan, LayerSplit, ModelShape, SnapKV, Streaming
from sparsekv.policies.base import Need, Phase
from sparsekv.policies.wrapper import Wrapper

HELD = (192, 320, 576)
PROMPT, STEPS = 1024, {True: 256, False: 16}  # steps: on a GPU, on a CPU


@dataclass(frozen=True)
class PromptOnly(Wrapper):
    """`scorer` with `spare` less budget, until the prompt is in; then every token stays."""

    spare: int = 0

    name: ClassVar[str] = "prompt_only"
    keeps: ClassVar[str] = "as its scorer after the prompt, and every generated token"
    paper: ClassVar[str] = "none (control)"

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        """As the scorer's."""
        return self.scorer.stateful

    def plan(self, shape: ModelShape, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        plans = self.scorer.plan(shape, tokens, budget - self.spare)
        return tuple(replace(plan, decode="grow") for plan in plans)

    def needs(self, layer: int, phase: Phase) -> Need | None:
        return self.scorer.needs(layer, "prefill") if phase == "prefill" else None

    def observe(
        self, layer: int, phase: Phase, state: Tensor, columns: Tensor, positions: Tensor
    ) -> Tensor:
        return self.scorer.observe(layer, phase, state, columns, positions)

    def decay(self, layer: int) -> float | None:
        return self.scorer.decay(layer)

    def select(self, *args: Any, **kwargs: Any) -> Any:
        return self.scorer.select(*args, **kwargs)


@torch.no_grad()
def steps(arm: Arm, count: int, session: Session) -> list[Row]:
    """The mean loss of the `count` tokens after the prompt, row by row, and the mean held."""
    rng = random.Random(f"decode time {session.options.seed}")
    ids = torch.tensor(passages(session.request(), PROSE, PROMPT + count + 1, rng))
    model, ids = session.model, ids.to(session.model.device)
    sparsekv.patch(model, arm.policy, arm.budget)
    cache = sparsekv.new_cache(model)
    extra = {cache_key(model): cache, "use_cache": True, "logits_to_keep": 1}
    model(input_ids=ids[:, :PROMPT], **extra)
    losses, held = [], []
    for t in range(PROMPT, PROMPT + count):
        logits = model(input_ids=ids[:, t : t + 1], **extra).logits[:, -1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[:, t + 1], reduction="none"))
        held.append(cache.report())
    facts = {
        "headline": "nll",
        "kept": sum(report.kept.mean for report in held) / count,
        "kv_bytes": sum(report.kv_bytes for report in held) / count / len(ids),
        "dense_kv_bytes": sum(report.dense_bytes for report in held) / count / len(ids),
    }
    means = torch.stack(losses).mean(0).tolist()
    return [{"example": str(i), "nll": nll} | facts for i, nll in enumerate(means)]


class DecodeTime(Experiment):
    """The arms on one text a context, step by step."""

    def unit(self, options: Options, arm: Arm, task: str, protocol: str) -> Unit:
        """All rows at once."""
        count = STEPS[options.on_gpu]
        if isinstance(arm.policy, PromptOnly):
            arm = replace(arm, policy=replace(arm.policy, spare=count // 2))
        settings = key_of(options, arm.policy, arm.budget, count)
        key = f"steps.n{options.samples}.s{options.seed}.{arm.label}.{arm.budget}.{settings}"
        return Unit(key.replace(" ", "-"), partial(steps, arm, count))


EVERY_STEP: dict[str, Any] = {
    "streaming": Streaming(),
    "h2o": H2O(),
    "tova": TOVA(),
    "layersplit": LayerSplit(),
}
ONCE = {f"{label}, once": PromptOnly(policy) for label, policy in EVERY_STEP.items()}
ONCE["snapkv, once"] = PromptOnly(SnapKV())

EXPERIMENT = DecodeTime(
    name="decode_time",
    question="Evict at every step, or once after the prompt, at equal memory?",
    arms=tuple(
        Arm(label, policy, held) for label, policy in (EVERY_STEP | ONCE).items() for held in HELD
    ),
    tasks=("prose, 1024 tokens and more",),
    protocols=("token by token",),
    against={label: f"{label}, once" for label in EVERY_STEP},
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
