"""Every family, patched: nothing changes at full budget, and what eviction changes is exact.

Batches hold 60 and 41 real tokens, left-padded; sliding windows are 24. The truth is the model's
own eager attention, with evicted keys hidden from each head where eviction is tested.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from families import FAMILIES, WINDOW, build, sliding_layers
from rig import Loop, Run, greedy, kept, left_padded, prompt
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.masking_utils import eager_mask

import sparsekv
from sparsekv.hf.compat import cache_key
from sparsekv.policies import H2O, LayerPlan, Need, Policy, SnapKV

ROWS = [prompt(60), prompt(41, 1)]
PAD = 60 - 41
BUDGET, NEW = 24, 7
SPARSE = {"snapkv": SnapKV(window=8), "h2o": H2O()}
GOVERNED = [name for name in FAMILIES if len(sliding_layers(name)) < 4]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Models whose every layer slides are patched here on purpose; that warning has its test."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "every layer of .* has a sliding window")
        yield


def generate(model: PreTrainedModel, rows: list[Tensor] = ROWS, **kwargs: Any) -> Run:
    batch = left_padded(*rows)
    return greedy(model, batch["input_ids"], NEW, attention_mask=batch["attention_mask"], **kwargs)


@pytest.fixture(scope="module")
def dense() -> dict[str, Run]:
    """Unpatched eager runs by family, made when first asked for."""
    return {}


def dense_run(dense: dict[str, Run], family: str) -> Run:
    if family not in dense:
        dense[family] = generate(build(family))
    return dense[family]


# ---------------------------------------------------------------------- nothing evicted


@pytest.mark.parametrize("chunk", [None, 17])
@pytest.mark.parametrize("family", FAMILIES)
def test_full_is_dense(family: str, chunk: int | None, dense: dict[str, Run]) -> None:
    """The first chunk of the short row is nothing but padding."""
    want = dense_run(dense, family)
    run = generate(sparsekv.patch(build(family), "full"), prefill_chunk_size=chunk)
    assert run.tokens.tolist() == want.tokens.tolist()
    torch.testing.assert_close(run.logits, want.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_foreign_cache_is_dense(family: str, dense: dict[str, Run]) -> None:
    """A patched model attends densely over any cache that is not ours."""
    model = sparsekv.patch(build(family), SPARSE["snapkv"], BUDGET)
    batch = left_padded(*ROWS)
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits[:, -1]
    padded_positions = dense_run(dense, family).logits[0]
    torch.testing.assert_close(logits, padded_positions, atol=1e-4, rtol=0)


# ---------------------------------------------------------------------- evicted


class Recorder(LogitsProcessor):
    """Writes down what a cache keeps after every forward; changes no logits."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.kept = cache, []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.kept.append([kept(self.cache, row) for row in range(len(input_ids))])
        return scores


def recorded_run(model: PreTrainedModel, rows: list[Tensor], **kwargs: Any) -> tuple[Run, list]:
    """A run and kept columns as [forward][row][layer][head]."""
    cache = sparsekv.new_cache(model)
    recorder = Recorder(cache)
    kwargs |= {cache_key(model): cache, "logits_processor": LogitsProcessorList([recorder])}
    return generate(model, rows, **kwargs), recorder.kept


def hide(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any
) -> tuple[Tensor, Any]:
    """The model's own eager attention, with hidden[layer] [B, HQ, T, S] masked out as well."""
    hidden = kwargs.pop("hidden").get(module.layer_idx)
    if hidden is not None:
        mask = mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, mask, **kwargs)


@torch.no_grad()
def reference_logits(family: str, run: Run, history: list) -> Tensor:
    """[NEW, B, V] by one eager forward in which every query sees what was kept before its step."""
    AttentionInterface.register("hide", hide)
    AttentionMaskInterface.register("hide", eager_mask)
    model = build(family)
    model.set_attn_implementation("hide")
    ids, heads = run.sequences[:, :-1], 4
    columns, hidden = ids.shape[1], {}
    for layer in set(range(4)) - set(sliding_layers(family)):
        hidden[layer] = torch.zeros(len(ROWS), heads, columns, columns, dtype=torch.bool)
        for step, before in enumerate(history[:-1]):
            query = 60 + step
            for row in range(len(ROWS)):
                for head in range(heads):
                    hidden[layer][row, head, query] = True
                    hidden[layer][row, head, query, before[row][layer][head // 2]] = False
                    hidden[layer][row, head, query, query] = False
    mask = torch.nn.functional.pad(left_padded(*ROWS)["attention_mask"], (0, columns - 60), value=1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, hidden=hidden)
    return output.logits[:, 59:].transpose(0, 1)


@pytest.mark.parametrize("policy", SPARSE)
@pytest.mark.parametrize("family", FAMILIES)
def test_sparse(family: str, policy: str) -> None:
    """B61, B62: sliding layers keep their window, full layers their budget, logits are exact."""
    model = sparsekv.patch(build(family), SPARSE[policy], BUDGET)
    run, history = recorded_run(model, ROWS)
    torch.testing.assert_close(
        run.logits, reference_logits(family, run, history), atol=1e-4, rtol=0
    )
    for step, rows in enumerate(history):
        seen = 60 + step
        for layer, heads in ((i, heads) for row in rows for i, heads in enumerate(row)):
            if layer in sliding_layers(family):
                # A prompt leaves what its next query sees besides itself, a step the window.
                assert heads == [list(range(seen - WINDOW + (step == 0), seen))] * 2
                continue
            size = BUDGET + (step if policy == "snapkv" else 0)
            recent = 8 + step if policy == "snapkv" else BUDGET // 2
            for head in heads:
                assert len(head) == len(set(head)) == size
                assert head[-recent:] == list(range(seen - recent, seen))
    alone, alone_history = recorded_run(model, ROWS[1:])
    assert run.tokens[1].tolist() == alone.tokens[0].tolist()
    torch.testing.assert_close(run.logits[:, 1], alone.logits[:, 0], atol=1e-4, rtol=0)
    for batch, single in zip(history, alone_history, strict=True):
        assert batch[1] == [[[j + PAD for j in head] for head in layer] for layer in single[0]]


@pytest.mark.parametrize("policy", SPARSE)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen2-mixed"])
def test_sparse_in_chunks(family: str, policy: str) -> None:
    """A prompt in chunks of 17: the same budgets and windows, rows independent of the batch."""
    model = sparsekv.patch(build(family), SPARSE[policy], BUDGET)
    _, history = recorded_run(model, ROWS, prefill_chunk_size=17)
    sliding = sliding_layers(family)
    for row in history[0]:
        for layer, heads in enumerate(row):
            newest = list(range(60 - WINDOW + 1, 60))
            assert (
                heads == [newest] * 2 if layer in sliding else [len(h) for h in heads] == [24] * 2
            )
    # Chunks of the short row end at the same columns if its prompt is one padding shorter.
    with torch.no_grad():
        single = Loop(model)
        for start, end in ((0, 34 - PAD), (34 - PAD, 51 - PAD), (51 - PAD, 41)):
            single.feed(ROWS[1][:, start:end])
    shifted = [[[j + PAD for j in head] for head in layer] for layer in single.kept()]
    assert history[0][1] == shifted


@pytest.mark.parametrize("family", ["mistral-window", "phi3-window"])
def test_nothing_to_govern(family: str, dense: dict[str, Run]) -> None:
    """A model whose every layer slides is patched with a warning, and stays as it was."""
    with pytest.warns(UserWarning, match="every layer of .* has a sliding window and keeps it"):
        model = sparsekv.patch(build(family), "snapkv", BUDGET)
    run = generate(model)
    torch.testing.assert_close(run.logits, dense_run(dense, family).logits, atol=1e-4, rtol=0)


# ---------------------------------------------------------------------- statistics


@dataclass(frozen=True)
class Witness(Policy):
    """Keeps everything and remembers every statistic that the runtime hands out."""

    rows: int | None = None
    columns: list = field(default_factory=list, compare=False)

    name = keeps = paper = "witness"
    stateful = True

    def plan(self, shape: Any, tokens: int, budget: int) -> tuple[LayerPlan, ...]:
        return (LayerPlan(None),) * shape.num_layers

    def needs(self, layer: int, phase: str) -> Need:
        return Need("sum", rows=self.rows if phase == "prefill" else None)

    def observe(
        self, layer: int, phase: str, state: Tensor, columns: Tensor, positions: Tensor
    ) -> Tensor:
        self.columns.append((layer, phase, columns.clone(), positions.clone()))
        return state + columns

    def score(self, layer: int, stats: Any) -> Tensor:
        raise AssertionError("nothing has to go")


@torch.no_grad()
def eager_probabilities(family: str, ids: Tensor) -> list[Tensor]:
    """[HQ, T, T] of every full-attention layer, for one row without padding."""
    output = build(family)(input_ids=ids, output_attentions=True, use_cache=False)
    sliding = sliding_layers(family)
    return [p[0] for layer, p in enumerate(output.attentions) if layer not in sliding]


def statistic(probabilities: Tensor, first: int, last: int) -> Tensor:
    """Column sums of query rows first .. last - 1, mean over the group of 2: [HK, S]."""
    return probabilities[:, first:last, :last].sum(1).unflatten(0, (2, 2)).mean(1)


def in_order(columns: Tensor, positions: Tensor, row: int, length: int) -> Tensor:
    """A recorded statistic [HK, length] of one row in position order, whatever the slots."""
    order = positions[row, :, : columns.shape[-1]].long()[:, :length].argsort(-1)
    return columns[row].gather(-1, order)


@pytest.mark.parametrize("rows", [None, 8])
@pytest.mark.parametrize("family", GOVERNED)
def test_statistics_are_eager(family: str, rows: int | None) -> None:
    """B63: column sums equal those of eager attention: q/k norm, softcap and sinks included."""
    witness = Witness(rows)
    model = sparsekv.patch(build(family), witness)
    run = generate(model)
    layers = 4 - len(sliding_layers(family))
    prefill = [record for record in witness.columns if record[1] == "prefill"]
    decode = [record for record in witness.columns if record[1] == "decode"]
    assert [record[0] for record in prefill] == list(range(layers))
    assert [record[0] for record in decode] == list(range(layers)) * (NEW - 1)
    for row, length in enumerate((60, 41)):
        ids = run.sequences[row : row + 1, 60 - length : -1]
        for layer, probabilities in enumerate(eager_probabilities(family, ids)):
            got = in_order(*prefill[layer][2:], row, length)
            want = statistic(probabilities, 0 if rows is None else length - rows, length)
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
            for step in range(NEW - 1):
                _, _, columns, positions = decode[step * layers + layer]
                got = in_order(columns, positions, row, length + step + 1)
                want = statistic(probabilities, length + step, length + step + 1)
                torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    mass = prefill[0][2][0].sum(-1)  # of 60 or 8 query rows
    expected = torch.full_like(mass, 60.0 if rows is None else rows)
    if family == "gpt_oss":
        assert (mass < 0.99 * expected).all(), "expected the sinks to take their share"
    else:
        torch.testing.assert_close(mass, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt_oss", "smollm3"])
def test_window_statistic_spans_chunks(family: str) -> None:
    """With a prompt in chunks of 17, the last 32 queries still vote together (9 in the last)."""
    witness = Witness(32)
    generate(sparsekv.patch(build(family), witness), prefill_chunk_size=17)
    layers = 4 - len(sliding_layers(family))
    last = [record for record in witness.columns if record[1] == "prefill"][-layers:]
    for row, length in enumerate((60, 41)):
        for layer, probabilities in enumerate(eager_probabilities(family, ROWS[row])):
            got = in_order(*last[layer][2:], row, length)
            want = statistic(probabilities, length - 32, length)
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
