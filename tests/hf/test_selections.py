"""What `Policy.select` may give: fewer keys than asked for works, anything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
import torch
from rig import Loop, prompt, tiny_llama
from torch import Tensor
from zoo import example

import sparsekv
import sparsekv.selection
from sparsekv.policies import POLICIES, AdaKV, LayerPlan, Policy, Selection, SnapKV

BUDGET = 8


@dataclass(frozen=True)
class Custom(Policy):
    """Selects by a function of what `select` gets."""

    choose: Callable[..., Any]
    plans: dict = field(default_factory=dict)

    name: ClassVar[str] = "custom"
    keeps: ClassVar[str] = "what it is told"
    paper: ClassVar[str] = "none"
    evicts_by: ClassVar[Literal["score", "position"]] = "position"

    def plan(self, shape, tokens, budget):
        return (LayerPlan(budget, **self.plans),) * shape.num_layers

    def score(self, layer, stats):
        return stats.positions.float()

    def select(self, scores, keep, protected, topk, *, layer, stats):
        return self.choose(scores=scores, keep=keep, protected=protected, topk=topk)


class Ragged(Custom):
    """The heads of a row share the budget."""

    ragged: ClassVar[bool] = True


def selection(*heads: list[int], count: list[int] | None = None, batch: int = 1) -> Selection:
    """The same indices in each row, one list a KV head, padded with -1."""
    width = max(map(len, heads))
    index = torch.tensor([head + [-1] * (width - len(head)) for head in heads]).int()
    counts = torch.tensor(count or [len(head) for head in heads]).int()
    return Selection(index.expand(batch, -1, -1), counts.expand(batch, -1))


def always(chosen: Any) -> Custom:
    """A policy that gives `chosen`, whatever it is."""
    return Custom(lambda **_: chosen)


def loop_of(policy: Policy, **config: Any) -> Loop:
    return Loop(sparsekv.patch(tiny_llama(**config), policy, BUDGET))


def masked(ids: Tensor, tokens: int, heads: tuple[list[int], ...]) -> Tensor:
    """Logits [B, T, V] of a dense model whose queries from `tokens` on see only some of those."""
    total = ids.shape[1]
    seen = torch.ones(len(ids), 4, total, total, dtype=torch.bool).tril()
    for head, kept in enumerate(heads):
        lost = sorted(set(range(tokens)) - set(kept))
        seen[:, 2 * head : 2 * head + 2, tokens:, lost] = False
    with torch.no_grad():
        return tiny_llama()(ids, attention_mask=torch.where(seen, 0.0, -torch.inf)).logits


@pytest.mark.parametrize("policy", [Custom, Ragged])
@pytest.mark.parametrize(
    "heads",
    [
        ([30, 31, 32], [30, 31, 32]),
        ([0, 7, 8, 20, 49], [3]),
        ([*range(8)], []),
        ([*range(40, 48)], [*range(1, 49, 6)]),
    ],
    ids=str,
)
def test_fewer_than_asked(policy, heads):
    ids = torch.cat([prompt(56, 1), prompt(56, 2)])
    loop = loop_of(policy(lambda **_: selection(*heads, batch=2)))
    got = [loop.feed(ids[:, :50]), *(loop.feed(token) for token in ids[:, 50:].split(1, dim=1))]
    torch.testing.assert_close(torch.cat(got, 1), masked(ids, 50, heads), atol=1e-4, rtol=0)
    for row in range(2):
        assert loop.kept(row) == [[[*head, *range(50, 56)] for head in heads]] * 3
    report, counts = loop.cache.report(), [len(head) + 6 for head in heads]
    assert (report.kept.min, report.kept.max) == (min(counts), max(counts))
    for store in loop.cache.state.stores:
        store.validate()


@pytest.mark.parametrize(
    "plans",
    [
        {"decode": "grow"},
        {"decode": "replace"},
        {"decode": "evict"},
        {"decode": "interval", "prefill": 6, "low": 5},
    ],
    ids=str,
)
def test_fewer_than_asked_goes_on(plans):
    """Later turns and compressions cut from what is there; a step has room until the budget."""

    def every_other(scores, **_):
        batch, heads, held = scores.shape
        return selection(*[[*range(held - 1, -1, -2)][2::-1]] * heads, batch=batch)

    loop = loop_of(Custom(every_other, plans))
    loop.feed(prompt(50))
    expected = [45, 47, 49]
    assert loop.kept() == [[expected] * 2] * 3
    for step in range(50, 60):
        loop.feed(prompt(1, step))
        expected = [*expected, step]
        if plans["decode"] != "grow" and len(expected) > BUDGET:
            expected = expected[-5::2] if "low" in plans else expected[1:]
        assert loop.kept() == [[expected] * 2] * 3
    loop.feed(prompt(9))
    expected = [64, 66, 68]
    assert loop.kept() == [[expected] * 2] * 3
    for store in loop.cache.state.stores:
        store.validate()


NINE = [*range(9)]
ORDER = "indices of held keys, ascending, each once, then -1, got others in row 0, KV head 1"


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (selection(NINE, [1, 2]), "to keep at most 8 keys of a KV head, got 9"),
        (selection([1, 2], [*range(30, 50)]), "to keep at most 8 keys of a KV head, got 20"),
        (selection([1, 2], [5, 5]), ORDER),
        (selection([1, 2], [6, 5]), ORDER),
        (selection([1, 2], [6, 50]), ORDER),
        (selection([1, 2], [-1, 6]), ORDER),
        (selection([1, 2], [-2, 6]), ORDER),
        (selection([1, 2], [6, 7], count=[2, 1]), ORDER),
        (selection([1, 2], [6, 7], count=[2, 3]), ORDER),
        (selection([1, 2], [], count=[2, -1]), ORDER),
        (selection([1, 2]), r"index int32 \[1, 2, K\] and .*, got torch.int32 \[1, 1, 2\]"),
        (
            Selection(*(x.long() for x in (selection([1], [2]).index, selection([1], [2]).count))),
            r"index int32 \[1, 2, K\] and count int32 \[1, 2\], got torch.int64",
        ),
        (None, "to give a Selection, got None"),
    ],
)
def test_what_is_refused(chosen, message):
    loop = loop_of(always(chosen))
    with pytest.raises(ValueError, match=f"expected Custom.select .*{message}"):
        loop.feed(prompt(50))


def test_heads_that_share_keep_no_more_together():
    loop = loop_of(Ragged(lambda **_: selection([*range(15)], [49])))
    loop.feed(prompt(50))
    assert loop.kept() == [[[*range(15)], [49]]] * 3
    loop = loop_of(Ragged(lambda **_: selection([*range(15)], [48, 49])))
    with pytest.raises(ValueError, match="at most 16 keys of all KV heads of a row together, got"):
        loop.feed(prompt(50))


@pytest.mark.parametrize(
    ("ask", "kept"),
    [
        (lambda keep, **_: (keep, slice(None)), range(42, 50)),
        (lambda keep, **_: (keep // 2, slice(None)), range(46, 50)),
        (lambda keep, **_: (keep, slice(5)), range(5)),
    ],
)
def test_answers_of_topk_to_other_questions(ask, kept):
    """The counts are those of the answer, not of what the plan would have asked."""

    def choose(scores, keep, protected, topk):
        own, part = ask(keep)
        return topk(scores[..., part], own, protected[..., part])

    loop = loop_of(Custom(choose))
    loop.feed(prompt(50))
    assert loop.kept() == [[[*kept]] * 2] * 3
    loop.cache.state.stores[0].validate()


@pytest.mark.filterwarnings("ignore:pyramid gives all")
@pytest.mark.parametrize("name", POLICIES)
def test_the_host_does_not_wait_for_policies_of_the_library(name, monkeypatch):
    """What their top-k answered is taken as it is; counts are fetched where heads share."""
    policy, asked, original = example(name), [], sparsekv.selection._counted

    def counted(policy, selection, keys, most, well_formed):
        asked.append(well_formed)
        return original(policy, selection, keys, most, well_formed)

    monkeypatch.setattr(sparsekv.selection, "_counted", counted)
    model = sparsekv.patch(tiny_llama(), policy, 40)
    model.generate(prompt(90), max_new_tokens=10, do_sample=False)
    assert bool(asked) == isinstance(policy, AdaKV) and all(asked)


@pytest.mark.parametrize(
    ("score", "got"),
    [
        (lambda columns: None, "NoneType"),  # a forgotten return
        (lambda columns: columns[..., 1:], r"\[1, 2, 39\]"),
        (lambda columns: columns.mean(1, keepdim=True), r"\[1, 1, 40\]"),  # no broadcasting
        (lambda columns: columns[0], r"\[2, 40\]"),
    ],
)
def test_scores_of_other_keys_are_refused(score, got):
    """In the policy's words, not in those of the top-k kernel."""

    class Scored(SnapKV):
        def score(self, layer, stats):
            return score(stats.columns)

    message = rf"expected scores of shape \[1, 2, 40\] from Scored, got {got}"
    with pytest.raises(ValueError, match=message):
        loop_of(Scored()).feed(prompt(40))
