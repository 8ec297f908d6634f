"""Random walks: whatever happens to a batch, each row is what the reference makes of it alone.

A walk has a random policy, budget and shape, and a dozen random events: padded chunks, decode
steps, drafts of which some are taken back, rows that are swapped, copied or dropped. Averaged
pooling is left out: its plateaus differ by rounding only, and so would the choice among them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from reference import Reference
from rig import Loop, left_padded, tiny_llama
from torch import Tensor

import sparsekv
from sparsekv.kernels._quant import KV_FORMATS
from sparsekv.policies import H2O, LayerSplit, Policy, Pyramid, SnapKV, Streaming

BUDGETS = [1, 2, 5, 9, 16, 17, 24, 0.1, 0.3, 0.5, 0.8, 1.0]


def any_policy(pick: random.Random) -> Policy:
    """One of the evicting policies with settings that disagree with its defaults."""
    group = pick.choice(["mean", "max", "sum"])
    pool = pick.choice(["max", "none"])
    window = pick.choice([1, 4, 8, 40])
    kind = pick.choice([Streaming, H2O, SnapKV, Pyramid, LayerSplit])
    if kind is Streaming:
        return Streaming(pick.choice([0, 1, 4, 18]), pick.choice(["original", "cache"]))
    if kind is H2O:
        return H2O(pick.choice([0.0, 0.3, 0.5, 1.0]), group)
    if kind is SnapKV:
        return SnapKV(window, pick.choice([1, 3, 7]), pool, group)
    if kind is Pyramid:
        rounding = pick.choice(["exact", "official"])
        return Pyramid(window, 3, pool, group, pick.choice([2, 20]), rounding)
    return LayerSplit(
        pick.choice([0, 1, 2]), window, pick.choice([None, 0, 1, 5]), pick.choice(["ema", "sum"]),
        pool=pool, kernel=3, group=group,
    )  # fmt: skip


class Walk:
    """A batch under a patched model, and one reference a row."""

    def __init__(
        self, seed: int, kv_dtype: str | None = None, fixed: Callable[..., Policy] | None = None
    ) -> None:
        """fixed: the policy for a model of that many layers and KV heads, if it is not random."""
        self.pick = random.Random(seed)
        policy, budget = any_policy(self.pick), self.pick.choice(BUDGETS)
        model = tiny_llama(
            seed, num_hidden_layers=self.pick.choice([1, 2, 3]),
            num_key_value_heads=self.pick.choice([1, 2, 4]),
        )  # fmt: skip
        if fixed is not None:
            policy = fixed(model.config.num_hidden_layers, model.config.num_key_value_heads)
        if kv_dtype is not None:  # in float64 both sides round the same numbers
            model = model.double()
            if isinstance(policy, Streaming):  # moved sinks are rounded twice
                policy = Streaming(policy.sinks)
        self.rows = [
            Reference(model, policy, budget, kv_dtype=kv_dtype)
            for _ in range(self.pick.choice([1, 1, 2, 3]))
        ]
        self.loop = Loop(
            sparsekv.patch(
                model, policy, budget, page_size=self.pick.choice([16, 32]), kv_dtype=kv_dtype
            )
        )
        self.mask = torch.zeros(len(self.rows), 0, dtype=torch.long)

    def feed(self, ids: Tensor, new: Tensor) -> Tensor:
        """Logits of ids [B, T] with mask `new` [B, T]; plain calls where nothing is padded."""
        mask = torch.cat([self.mask, new], 1)
        if mask.all() and self.pick.random() < 0.5:
            return self.loop.feed(ids)
        positions = (mask.cumsum(-1) - 1)[:, -ids.shape[1] :].clamp_min(0)
        return self.loop.feed(ids, attention_mask=mask, position_ids=positions)

    def compare(self, logits: Tensor, ids: list[Tensor]) -> None:
        """The last logits of each row against its reference, which is fed ids [1, T_row]."""
        for got, row, fed in zip(logits, self.rows, ids, strict=True):
            expected = row.feed(fed)
            torch.testing.assert_close(got[-fed.shape[1] :], expected, atol=2e-4, rtol=0)

    def random_ids(self, rows: int, tokens: int) -> Tensor:
        return torch.tensor(
            [[self.pick.randint(2, 127) for _ in range(tokens)] for _ in range(rows)]
        )

    def chunk(self, at_least: int = 2) -> None:
        """A left-padded turn of 2 or more tokens a row (one alone would be a decode step)."""
        longest = self.pick.choice([4, 30, 50])
        ids = [self.random_ids(1, self.pick.randint(at_least, longest)) for _ in self.rows]
        batch = left_padded(*ids)
        self.compare(self.feed(batch["input_ids"], batch["attention_mask"]), ids)
        self.mask = torch.cat([self.mask, batch["attention_mask"]], 1)

    def decode(self) -> None:
        ids = self.random_ids(len(self.rows), 1)
        self.compare(self.feed(ids, torch.ones_like(ids)), list(ids.split(1)))
        self.mask = torch.cat([self.mask, torch.ones_like(ids)], 1)

    def draft(self) -> None:
        """Up to 6 drafts in one forward, some of them taken back."""
        self.loop.cache.activate_past_recording()
        ids = self.random_ids(len(self.rows), self.pick.randint(1, 6))
        accepted = self.pick.randint(0, ids.shape[1])
        logits = self.feed(ids, torch.ones_like(ids))
        self.loop.cache.crop(accepted - ids.shape[1])
        for i in range(accepted):
            self.compare(logits[:, : i + 1], list(ids[:, i : i + 1].split(1)))
        self.mask = torch.cat([self.mask, torch.ones_like(ids[:, :accepted])], 1)
        self.loop.cache.state.recording = False

    def reorder(self) -> None:
        """Rows swapped, copied or dropped."""
        count = self.pick.randint(1, min(4, len(self.rows) + 1))
        rows = [self.pick.randrange(len(self.rows)) for _ in range(count)]
        self.loop.cache.reorder_cache(torch.tensor(rows))
        self.rows = [copy.deepcopy(self.rows[row]) for row in rows]
        self.mask = self.mask[rows]

    def check(self) -> None:
        """Kept columns of every row, and the bookkeeping of the pages."""
        for i, row in enumerate(self.rows):
            column = self.mask[i].nonzero().flatten().tolist()
            expected = [[[column[j] for j in head] for head in layer] for layer in row.kept()]
            assert self.loop.kept(i) == expected
        for store in self.loop.cache.state.stores:
            store.validate()


@pytest.mark.filterwarnings("ignore:pyramid gives all")
@pytest.mark.parametrize("seed", range(24))
def test_random_walk(seed):
    run(Walk(seed))


@pytest.mark.filterwarnings("ignore:pyramid gives all")
@pytest.mark.parametrize("seed", range(100, 112))
def test_random_walk_of_a_quantised_cache(seed):
    run(Walk(seed, [*KV_FORMATS][seed % len(KV_FORMATS)]))


def run(walk: Walk, drafts: bool = True) -> None:
    walk.chunk(at_least=1)
    walk.check()
    events = [walk.chunk, walk.decode, walk.decode, walk.draft, walk.reorder]
    for _ in range(12):
        event = walk.pick.choice(events if drafts else [e for e in events if e != walk.draft])
        event()
        walk.check()
