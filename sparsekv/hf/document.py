"""`Document`: read and compress a text once, then ask any number of questions about it.

The text is compressed before any question is known, so the policy should not rank by the prompt's
last tokens; `kvzip` is made for this. A question goes to a copy of the compressed cache, exactly as
`generate` would put it into a further turn. The document itself never changes, and the order of
questions does not matter.

Where the cut is. Under a chat template text and question are one user's turn:

    <start of the turn> TEXT | "\\n\\n" QUESTION <end of the turn, start of the answer>

The template is applied once to a turn with a mark in the question's place. What comes before the
mark is read and compressed, what comes after it follows every question. Without a template, or
with chat=False, "\\n\\nQuestion: QUESTION\\nAnswer:" follows the text. Both sides are tokenised
apart, so no token crosses the cut.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsekv.hf.cache import SparseCache
from sparsekv.hf.check import layer_specs
from sparsekv.hf.compat import cache_key
from sparsekv.hf.parts import model_parts
from sparsekv.hf.patch import is_patched, new_cache, patch
from sparsekv.policies import KVzip, Policy, get_policy
from sparsekv.policies.base import positive
from sparsekv.report import CacheReport

_MARK = "<<the question>>"
_PLAIN = ("\n\nQuestion: ", "\nAnswer:")
_VERSION = 1
_SAVED = {"version", "model", "cache", "ids", "around"}
_PROOF_ROWS = 64  # of the embedding matrix, to tell one model from another
# Options of `generate` that are no business of who asks, and why.
_OWN = (
    "inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache",
    "past_key_values", "use_cache", "cache_implementation", "return_dict_in_generate",
)  # fmt: skip
_NOT_TAKEN = dict.fromkeys(_OWN, "which is set here") | {
    "generation_config": "whose fields are options of their own",
    "num_return_sequences": "as each question has one answer",
    "token_healing": "which would read the text again",
    **dict.fromkeys(
        ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp",
         "is_assistant"),
        "as drafts need an empty cache",
    ),
}  # fmt: skip


class Document:
    """A text in a compressed KV cache.

    Args:
        model, tokenizer: a causal language model and what belongs to it. The model is patched with
            `policy` and stays so; a later patch does no harm to the document.
        text: what the questions are about.
        policy, budget, page_size, kv_dtype: see `sparsekv.patch`. A float budget is the share of
            the text that is kept; as a share it grows with questions and answers, an int does not.
        chat: put text and question into the chat template, if the tokenizer has one.
        prefill_chunk_size: read a long text in pieces of so many tokens, see `generate`.

    Raises:
        ValueError: see `sparsekv.patch`; an empty text or one that is no str, a bad
            prefill_chunk_size, a policy that allows no second turn, or a chat template that changes
            a user's words.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        text: str,
        policy: str | Policy = "kvzip",
        budget: int | float = 0.3,
        *,
        page_size: int = 16,
        kv_dtype: str | None = None,
        chat: bool = True,
        prefill_chunk_size: int | None = None,
    ) -> None:
        if not isinstance(text, str):
            raise ValueError(f"expected a text as a str, got {type(text).__name__}")
        if prefill_chunk_size is not None:
            positive("prefill_chunk_size", prefill_chunk_size)
        self.model, self.tokenizer = model, tokenizer
        chosen = get_policy(policy).with_tokenizer(tokenizer)
        if chosen.prunes:
            raise ValueError(
                f"expected a policy that allows a second turn, got {chosen.name!r}, whose prompts "
                f"come in one forward"
            )
        chat = chat and tokenizer.chat_template is not None
        head, self._around = _frame(tokenizer, text) if chat else (text, _PLAIN)
        # A chat template writes the special tokens itself.
        ids = tokenizer(head, return_tensors="pt", add_special_tokens=not chat)["input_ids"]
        if not text or not ids.shape[1]:
            raise ValueError("expected a text of at least one token, got an empty one")
        patch(model, chosen, budget, page_size=page_size, kv_dtype=kv_dtype)
        self._ids, self._cache = ids.to(model.device), new_cache(model)
        # One token is predicted and none is fed: the cache holds the text and nothing else.
        options = {"num_beams": 1, "prefill_chunk_size": prefill_chunk_size}
        self._generate(self._ids, torch.ones_like(self._ids), self._cache, 1, **options)
        # A question is a turn of its own, scored by its own queries, not one more chunk.
        self._cache.state.queries, self._cache.state.moments = {}, {}

    @property
    def tokens(self) -> int:
        """Tokens of the text and of what the chat template puts before it."""
        return self._ids.shape[1]

    def report(self) -> CacheReport:
        """What the compressed cache holds."""
        return self._cache.report()

    def cache(self) -> SparseCache:
        """A copy of the compressed cache, to go on from by hand; see `prompt` for its ids."""
        state = self._cache.state
        return copy.deepcopy(self._cache, {id(state.policy): state.policy})

    def prompt(self, question: str) -> tuple[Tensor, Tensor]:
        """Ids int64 [1, T] of the text, and [1, Q] of the question with what surrounds it.

        Raises:
            ValueError: an empty question, or one that is no str.
        """
        if not isinstance(question, str):
            raise ValueError(f"expected a question as a str, got {type(question).__name__}")
        if not question.strip():
            raise ValueError("expected a question, got an empty one")
        before, after = self._around
        asked = self.tokenizer(
            f"{before}{question}{after}", return_tensors="pt", add_special_tokens=False
        )["input_ids"]
        return self._ids, asked.to(self._ids.device)

    def ask(self, question: str, *, max_new_tokens: int = 128, **options: Any) -> str:
        """The answer, without white space around it; see `ask_all`."""
        return self.ask_all([question], max_new_tokens=max_new_tokens, **options)[0]

    def ask_all(
        self, questions: Sequence[str], *, max_new_tokens: int = 128, **options: Any
    ) -> list[str]:
        """The answers to questions that do not know of each other, as one batch.

        options: of `generate`; greedy unless they say otherwise. Not those that choose the
            prompt, the cache or the form of the output, no `generation_config` and no drafts.

        Raises:
            ValueError: an empty question, no question, a str in place of a list of them, an option
                that is not taken, or a model that was unpatched.
        """
        if isinstance(questions, str):
            raise ValueError("expected a list of questions, got a str: `ask` takes a single one")
        if not questions:
            raise ValueError("expected at least one question, got none")
        if not is_patched(self.model):
            raise ValueError("expected the model to be patched still, got one that was unpatched")
        beams = self._beams(options)
        asked = [self.prompt(question)[1][0] for question in questions]
        cache = self.cache()
        # A row a beam of each question, as `generate` lays them out; here they are all equal still.
        if len(asked) * beams > 1:
            cache.batch_repeat_interleave(len(asked) * beams)
        ids, mask = self._rows(asked)
        options["num_beams"] = beams
        output = self._generate(ids, mask, cache, max_new_tokens, **options)
        new = output[:, ids.shape[1] :]
        return [x.strip() for x in self.tokenizer.batch_decode(new, skip_special_tokens=True)]

    def _beams(self, options: dict[str, Any]) -> int:
        """Beams that `generate` will search with; ValueError for options that are not taken."""
        refused = [f"{name}, {_NOT_TAKEN[name]}" for name in options if name in _NOT_TAKEN]
        if refused:
            raise ValueError(f"expected other options of generate, got {'; '.join(refused)}")
        beams = options.get("num_beams")
        if beams is None:
            beams = self.model.generation_config.num_beams or 1
        positive("num_beams", beams)
        return beams

    def _rows(self, asked: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Text, padding, question in each row, and the mask: int64 [B, T + Q]."""
        width = max(map(len, asked))
        text, rows, masks = self._ids[0], [], []
        for one in asked:
            pads = text.new_zeros(width - len(one))
            rows.append(torch.cat([text, pads, one]))
            masks.append(torch.cat([torch.ones_like(text), pads, torch.ones_like(one)]))
        return torch.stack(rows), torch.stack(masks)

    def _generate(
        self, ids: Tensor, mask: Tensor, cache: SparseCache, new: int, /, **options: Any
    ) -> Tensor:
        """Prompts and answers, int64. What is set here holds over the model's own defaults."""
        pad = self.tokenizer.pad_token_id
        fill = {"pad_token_id": self.tokenizer.eos_token_id if pad is None else pad}
        own = {"use_cache": True, "return_dict_in_generate": False, "num_return_sequences": 1}
        return self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new,
            **({"do_sample": False} | fill | options | own | {cache_key(self.model): cache}),
        )

    def save(self, file: str | Path) -> None:
        """Write the compressed cache and the text's token ids, for `Document.load`.

        Raises:
            OSError: a file that cannot be written.
        """
        cache = self.cache()
        if isinstance(cache.state.policy, KVzip):
            cache.state.policy = replace(cache.state.policy, tokenizer=None)
        saved = {"version": _VERSION, "model": _proof(self.model), "cache": cache}
        with open(file, "wb") as opened:
            torch.save(saved | {"ids": self._ids, "around": self._around}, opened)

    @classmethod
    def load(cls, model: Any, tokenizer: Any, file: str | Path) -> Document:
        """A document that `save` wrote, with the model that read it, on the same devices.

        The file is a pickle: load only what you trust.

        Raises:
            ValueError: another model, other devices, or a file that is no document or one of
                another version.
            OSError: a file that cannot be opened.
        """
        saved = _read(file, model.device)
        if saved["model"] != _proof(model):
            raise ValueError(f"expected the model that read {file}, got another one")
        document = cls.__new__(cls)
        document.model, document.tokenizer = model, tokenizer
        document._ids, document._around = saved["ids"], saved["around"]
        document._cache = saved["cache"]
        state = document._cache.state
        if state.layers != layer_specs(model):
            raise ValueError(f"expected the model on the devices of {file}, got {model.device}")
        state.policy = state.policy.with_tokenizer(tokenizer)
        page, kept = state.page_size, state.kv_dtype
        patch(model, state.policy, state.budget, page_size=page, kv_dtype=kept)
        state.parts = model_parts(model, state.policy)
        return document


def _read(file: str | Path, device: torch.device) -> dict[str, Any]:
    """What `save` wrote; ValueError for anything else."""
    message = f"expected a document of version {_VERSION} in {file}, got another file"
    with open(file, "rb") as opened:
        try:
            saved = torch.load(opened, weights_only=False, map_location=device)
        except (MemoryError, torch.OutOfMemoryError):
            raise  # they say nothing of what is in the file
        except Exception as error:  # what is no pickle can end in any, a cut file in an OSError
            raise ValueError(message) from error
    if not isinstance(saved, dict) or set(saved) != _SAVED or saved["version"] != _VERSION:
        raise ValueError(message)
    return saved


def _frame(tokenizer: Any, text: str) -> tuple[str, tuple[str, str]]:
    """(what is read, (before, after) of a question) by the chat template."""
    turn = [{"role": "user", "content": f"{text}{_MARK}"}]
    whole = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    if whole.count(_MARK) != 1:
        raise ValueError(
            f"expected {_MARK!r} once in the chat of text and question, got it "
            f"{whole.count(_MARK)} times: the text holds it, or the template changes what users say"
        )
    head, after = whole.split(_MARK)
    return head, ("\n\n", after)


def _proof(model: Any) -> str:
    """What tells models apart: their kind, their layers, a few of their weights."""
    rows = model.get_input_embeddings().weight[:_PROOF_ROWS].detach().float().cpu()
    digest = hashlib.sha256(rows.numpy().tobytes()).hexdigest()
    return f"{type(model).__name__} {model.config.num_hidden_layers} {digest}"
