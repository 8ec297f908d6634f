"""lm-eval's Hugging Face model with a sparse cache.

Generation: `generate` of a patched model; the prompt is compressed once it has been read, the
question with it.

Log-likelihoods: stock HFLM runs context and continuation through one forward without a cache, where
nothing is ever evicted. Here the context but its last token is read and compressed, then that token
and the continuation are fed one at a time, as if they were being generated: every scored token is
predicted from the compressed cache. Continuations of one context share its cache. With policy
"full" the result is stock HFLM's up to rounding.

`loglikelihood_rolling` has a context of one token, so its text is fed one token at a time: it is
slow, and policies that evict after the prompt only score like a dense cache there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

import sparsekv
from sparsekv import models
from sparsekv.lm_harness.batches import Batch, Wanted, make_batches
from sparsekv.lm_harness.feeding import Feeding
from sparsekv.policies import Duo, Planned, Policy, get_policy

Request = tuple[Any, list[int], list[int]]  # what to call it, context, continuation


def _chosen(policy: str | Policy, gates: str | None, plan: str | None) -> Policy:
    for option, file, kind in (("gates", gates, Duo), ("plan", plan, Planned)):
        if file is not None:
            if policy != kind.name:
                raise ValueError(f"expected {option} with policy={kind.name}, got {policy!r}")
            return kind.load(Path(file))
    return get_policy(policy)


class SparseHFLM(HFLM):
    """`--model sparsekv --model_args pretrained=...,policy=pyramid,budget=512`.

    Args:
        pretrained: a hub id, a folder or a model; without it, SmolLM2-135M-Instruct.
        policy: a name or a policy. gates: for policy "duo", its file of gates. plan: for policy
            "planned", the file that `sparsekv plan` wrote.
        budget, page_size, kv_dtype: see `sparsekv.patch`.
        kwargs: what HFLM takes: tokenizer, dtype, device, batch_size, max_length, ...

    Raises:
        ValueError: see `sparsekv.patch`; batch_size "auto", which would measure a dense model;
            a file that is not the policy's.
    """

    def __init__(
        self,
        pretrained: Any = None,
        policy: str | Policy = "pyramid",
        budget: int | float = 512,
        *,
        gates: str | None = None,
        plan: str | None = None,
        page_size: int = 16,
        kv_dtype: str | None = None,
        **kwargs: Any,
    ) -> None:
        if str(kwargs.get("batch_size", 1)).startswith("auto"):
            raise ValueError("expected a number as batch_size for model sparsekv, got 'auto'")
        super().__init__(
            str(models.default_model()) if pretrained is None else pretrained, **kwargs
        )
        chosen = _chosen(policy, gates, plan).with_tokenizer(self.tokenizer)
        sparsekv.patch(self.model, chosen, budget, page_size=page_size, kv_dtype=kv_dtype)
        self.policy = chosen

    def _loglikelihood_tokens(
        self,
        requests: Sequence[Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding would give it) of each continuation."""
        wanted = [
            Wanted(i, *self._cut(context, continuation))
            for i, (_, context, continuation) in enumerate(requests)
        ]
        found: dict[int, tuple[float, bool]] = {}
        size = override_bs or int(self.batch_size)
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0)
        for batch in make_batches(wanted, size, alike=self.policy.prunes):
            found |= self._score(batch)
            bar.update(len(batch.wanted))
        bar.close()
        for i, (name, *_) in enumerate(requests):
            if name is not None:
                self.cache_hook.add_partial("loglikelihood", name, found[i])
        return [found[i] for i in range(len(requests))]

    def _cut(
        self, context: list[int], continuation: list[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Both, with the context cut on the left as stock HFLM cuts it.

        Raises:
            ValueError: a continuation that leaves no room for a context.
        """
        length = self.max_length
        if not context or not 0 < len(continuation) <= length:
            raise ValueError(
                f"expected a context and 1 to {length} tokens of continuation, got {len(context)} "
                f"and {len(continuation)}"
            )
        return tuple(context[len(continuation) - length - 1 :]), tuple(continuation)

    @torch.no_grad()
    def _score(self, batch: Batch) -> dict[int, tuple[float, bool]]:
        """The answers of one batch by the number of their request."""
        feeding = Feeding(self.model, batch.contexts, batch.context_of, batch.fed)
        device = self.model.device
        row = torch.tensor(batch.row_of, device=device)
        targets, real = batch.targets()
        targets, real = targets.to(device), real.to(device)  # [steps, N]
        total = torch.zeros(len(row), dtype=torch.float64, device=device)
        greedy = torch.ones(len(row), dtype=torch.bool, device=device)
        for step, logits in enumerate(feeding):
            likely: Tensor = logits.log_softmax(-1, dtype=self.softmax_dtype)[row]
            chosen = likely.gather(1, targets[step][:, None])[:, 0]
            total += torch.where(real[step], chosen.double(), 0.0)
            greedy &= (likely.argmax(-1) == targets[step]) | ~real[step]
        answers = zip(total.tolist(), greedy.tolist(), strict=True)
        return {one.number: answer for one, answer in zip(batch.wanted, answers, strict=True)}
