"""One greedy generation of one prompt, with its times and what its cache held."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

import sparsekv
from sparsekv.hf.compat import cache_key
from sparsekv.progress import counting
from sparsekv.report import CacheReport

_MIB = 1 << 20


@dataclass(frozen=True)
class Run:
    """What came out: new tokens and their text, seconds, and the cache after prompt and end.

    prefill_s: until the first new token; decode_s: the others. Reports are None for a dense run.
    """

    text: str
    tokens: tuple[int, ...]
    prefill_s: float
    decode_s: float
    prompt_report: CacheReport | None = None
    report: CacheReport | None = None

    @property
    def figures(self) -> str:
        """What the cache held once the prompt was in; a dense run has no figures."""
        report = self.prompt_report
        if report is None:
            raise ValueError("expected a sparse run, got a dense one")
        seen, kept = report.tokens_seen[0], report.kept.mean
        return (
            f"kept {kept:.0f} of {seen} prompt tokens per head ({100 * kept / seen:.0f} %) · "
            f"KV {report.dense_bytes / _MIB:.1f} MiB -> {report.kv_bytes / _MIB:.1f} MiB"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values, ready for JSON."""
        plain = {
            "text": self.text,
            "tokens": list(self.tokens),
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
        }
        if self.report is not None and self.prompt_report is not None:
            plain["cache_after_prompt"] = self.prompt_report.to_dict()
            plain["cache"] = self.report.to_dict()
        return plain


def encode(tokenizer: Any, prompt: str, *, chat: bool = True) -> Tensor:
    """Token ids int64 [1, T] of `prompt`, as a user's turn where the tokenizer has a chat template.

    Raises:
        ValueError: the prompt has no token.
    """
    chat = chat and tokenizer.chat_template is not None
    if chat:
        turn = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    # A chat template writes the special tokens itself.
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=not chat)["input_ids"]
    if ids.shape[1] == 0:
        raise ValueError("expected a prompt of at least one token, got an empty one")
    return ids


def generate(
    model: Any,
    tokenizer: Any,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    sparse: bool,
    on_token: Callable[[], None] = lambda: None,
) -> Run:
    """Continue `input_ids` [1, T] greedily by at most `max_new_tokens`.

    sparse: use a cache under the policy the model is patched with; a model run dense must not be
    patched. on_token: called once a new token.
    """
    cache = sparsekv.new_cache(model) if sparse else None
    clock = _Clock(on_token, cache)
    extra = {cache_key(model): cache} if sparse else {}
    started = time.perf_counter()
    output = model.generate(
        input_ids.to(model.device),
        attention_mask=torch.ones_like(input_ids, device=model.device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        streamer=clock,
        **extra,
    )
    ended = time.perf_counter()
    tokens = tuple(output[0, input_ids.shape[1] :].tolist())
    return Run(
        tokenizer.decode(tokens, skip_special_tokens=True),
        tokens,
        clock.first - started,
        ended - clock.first,
        clock.report,
        cache.report() if cache is not None else None,
    )


def generate_shown(
    model: Any, tokenizer: Any, input_ids: Tensor, max_new_tokens: int, name: str
) -> Run:
    """`generate` under a progress bar; `name` is "dense" or what a patched model's policy is."""
    label = f"{name}: {input_ids.shape[1]} prompt tokens"
    with counting(label, f"{label}, generating", max_new_tokens) as steps:
        return generate(
            model, tokenizer, input_ids, max_new_tokens,
            sparse=name != "dense", on_token=steps.step,
        )  # fmt: skip


class _Clock(BaseStreamer):
    """A streamer that times the first token, counts all, and measures the cache after the prompt.

    `generate` puts the prompt first and then each token, once it is on the CPU.
    """

    def __init__(self, on_token: Callable[[], None], cache: sparsekv.SparseCache | None) -> None:
        self.on_token, self.cache = on_token, cache
        self.puts = 0
        self.first = 0.0
        self.report: CacheReport | None = None

    def put(self, value: Tensor) -> None:
        """The prompt, then one token a call."""
        self.puts += 1
        if self.puts == 1:
            return
        if self.puts == 2:
            self.first = time.perf_counter()
            self.report = self.cache.report() if self.cache is not None else None
        self.on_token()

    def end(self) -> None:
        """Nothing is buffered."""
