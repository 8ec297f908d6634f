"""Every policy against the independent reference: tokens, logits and kept sets at every step."""

from __future__ import annotations

import pytest
import torch
from reference import Reference
from rig import EVICTING, POLICIES, Loop, greedy, prompt, tiny_llama
from torch import Tensor

import sparsekv
from sparsekv.hf.compat import cache_key
from sparsekv.policies import H2O, LayerSplit, Policy, Pyramid, SnapKV, Streaming

OTHER_SETTINGS: dict[str, Policy] = {
    "pyramid-official": Pyramid(window=4, beta=4, rounding="official"),
    "snapkv-avg-sum": SnapKV(window=8, kernel=5, pool="avg", group="sum"),
    "snapkv-nopool-max": SnapKV(window=8, pool="none", group="max"),
    "h2o-heavy": H2O(heavy_fraction=0.8, group="max"),
    "layersplit-pooled": LayerSplit(full_layers=1, window_rows=8, pool="max", kernel=3, recent=1),
    "streaming-1-sink": Streaming(sinks=1),
}


def pair(policy: Policy, budget: int | float, seed: int = 0) -> tuple[Reference, Loop]:
    """The reference and a manual loop over a patched model of the same weights."""
    model = tiny_llama(seed)
    return Reference(model, policy, budget), Loop(sparsekv.patch(model, policy, budget))


def check_feed(reference: Reference, loop: Loop, ids: Tensor) -> Tensor:
    """Feed both, compare logits and kept sets, return the greedy token [1, 1]."""
    expected, got = reference.feed(ids), loop.feed(ids)[0]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert loop.kept() == reference.kept()
    assert got.argmax(-1).tolist() == expected.argmax(-1).tolist()
    return expected[-1:].argmax(-1, keepdim=True)


@pytest.mark.parametrize(("budget", "seed"), [(12, 0), (0.6, 1)])
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_steps(policy, budget, seed):
    reference, loop = pair(POLICIES[policy], budget, seed)
    token = check_feed(reference, loop, prompt(37, seed))
    for _ in range(40):
        token = check_feed(reference, loop, token)


@pytest.mark.parametrize("policy", OTHER_SETTINGS)
def test_other_settings(policy):
    reference, loop = pair(OTHER_SETTINGS[policy], 15, seed=2)
    token = check_feed(reference, loop, prompt(33, 2))
    for _ in range(12):
        token = check_feed(reference, loop, token)


@pytest.mark.filterwarnings("ignore:pyramid gives all 3 layers")
@pytest.mark.parametrize("budget", [1, 3, 5])
@pytest.mark.parametrize("policy", EVICTING)
def test_tiny_budgets(policy, budget):
    """Below the sinks, below the window, below everything."""
    reference, loop = pair(POLICIES[policy], budget, seed=3)
    token = check_feed(reference, loop, prompt(11, 3))
    for _ in range(8):
        token = check_feed(reference, loop, token)


@pytest.mark.parametrize("policy", POLICIES)
def test_grows_into_its_budget(policy):
    """A prompt far below the budget; decoding fills it, then evicts."""
    reference, loop = pair(POLICIES[policy], 20, seed=4)
    token = check_feed(reference, loop, prompt(5, 4))
    for _ in range(30):
        token = check_feed(reference, loop, token)


@pytest.mark.parametrize("budget", [14, 0.4])
@pytest.mark.parametrize("policy", POLICIES)
def test_multi_turn(policy, budget):
    """Three turns of different lengths on one cache, with decoding between them."""
    reference, loop = pair(POLICIES[policy], budget, seed=5)
    for turn, length in enumerate((30, 7, 19)):
        token = check_feed(reference, loop, prompt(length, turn))
        for _ in range(5):
            token = check_feed(reference, loop, token)


@pytest.mark.parametrize("policy", POLICIES)
def test_chunked_feeding(policy):
    """Chunks shorter and longer than the observation window, scored by remembered queries too."""
    reference, loop = pair(POLICIES[policy], 14, seed=6)
    ids = prompt(45, 6)
    for chunk in ids.split([10, 3, 20, 2, 10], dim=1):
        token = check_feed(reference, loop, chunk)
    for _ in range(4):
        token = check_feed(reference, loop, token)


@pytest.mark.parametrize("policy", POLICIES)
def test_generate(policy):
    """`generate` is the manual loop: one prompt, then a second turn with the whole text."""
    model, chosen = tiny_llama(7), POLICIES[policy]
    reference = Reference(model, chosen, 16, remember=False)
    sparsekv.patch(model, chosen, 16)
    first = greedy(model, prompt(40, 7), 10)
    tokens, logits = reference.generate(prompt(40, 7), 10)
    assert first.tokens[0].tolist() == tokens
    torch.testing.assert_close(first.logits[:, 0], logits, atol=1e-4, rtol=0)
    # The second turn feeds the last token of the first one together with the question.
    text = torch.cat([first.sequences, prompt(9, 8)], 1)
    second = greedy(model, text, 10, **{cache_key(model): first.cache})
    tokens, logits = reference.generate(text[:, 49:], 10)
    assert second.tokens[0].tolist() == tokens
    torch.testing.assert_close(second.logits[:, 0], logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_generate_in_prefill_chunks(policy):
    model, chosen = tiny_llama(8), POLICIES[policy]
    reference = Reference(model, chosen, 16)
    sparsekv.patch(model, chosen, 16)
    run = greedy(model, prompt(44, 8), 8, prefill_chunk_size=10)
    for chunk in prompt(44, 8)[:, :40].split(10, dim=1):
        reference.feed(chunk)
    tokens, logits = reference.generate(prompt(44, 8)[:, 40:], 8)
    assert run.tokens[0].tolist() == tokens
    torch.testing.assert_close(run.logits[:, 0], logits, atol=1e-4, rtol=0)
