"""Policies under budgets, checked against a model before anything is measured."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import sparsekv
from sparsekv.hf.patch import Patch, cache_under, patch_of
from sparsekv.hf.pruning import install_hooks
from sparsekv.hf.recording import replayable
from sparsekv.policies import Full, Policy

Feed = Literal["chunk", "steps"]
# A budget for policies without one; `full` keeps everything.
_ANY = 1
# Characters of a setting that a record repeats.
_LONG = 200


@dataclass(frozen=True)
class Setting:
    """A policy under a budget (None: it has none), as the model accepted it.

    feed: how tokens behind the compressed ones come, see `sparsekv.evaluation.protocols`.
    """

    policy: Policy
    budget: int | float | None
    feed: Feed
    patch: Patch

    @property
    def replays(self) -> bool:
        """Whether recorded prompts serve it."""
        return replayable(self.policy)

    @cached_property
    def changed(self) -> dict[str, Any]:
        """The policy's fields that are not at their defaults, for records: gates, and whatever else
        is long, by a digest."""
        policy, plain = self.policy, type(self.policy)()
        fields = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy) if f.repr}
        return {
            name: _short(value) for name, value in fields.items() if value != getattr(plain, name)
        }

    def new_cache(self, model: Any, budget: int | float | None = None) -> sparsekv.SparseCache:
        """An empty cache; budget: another than its own."""
        own = budget if budget is not None else self.budget
        return cache_under(model, dataclasses.replace(self.patch, budget=own or _ANY))

    @contextmanager
    def on(self, model: Any) -> Iterator[None]:
        """Put the hooks of a policy that prunes on a patched model, for a while."""
        if not self.policy.prunes:
            yield
            return
        install_hooks(model, self.policy)
        try:
            yield
        finally:
            install_hooks(model, patch_of(model).policy)


def _short(value: object) -> bool | int | float | str | None:
    if isinstance(value, bool | int | float | str | None):
        return value
    text = repr(value)
    if len(text) <= _LONG:
        return text
    return f"{type(value).__name__} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def admit(
    model: Any,
    policy: Policy,
    budgets: Sequence[int | float],
    feed: Feed = "chunk",
    *,
    kv_dtype: str | None = None,
) -> list[Setting]:
    """The settings of a policy; `full` has one, whatever the budgets. The model stays patched.

    kv_dtype: how kept keys and values are quantised; records do not say it.

    Raises:
        ValueError: what `sparsekv.patch` refuses.
    """
    sparsekv.patch(model, policy, budgets[0] if budgets else _ANY, kv_dtype=kv_dtype)
    record = patch_of(model)
    own: Sequence[int | float | None] = (None,) if isinstance(policy, Full) else budgets
    # A chunk attends all pages, so a policy that reads some of them must be given single tokens;
    # one that prunes takes nothing else.
    steps = policy.selects_pages or policy.prunes
    return [Setting(policy, budget, "steps" if steps else feed, record) for budget in own]
