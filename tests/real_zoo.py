"""SmolLM2-135M on real English: a policy and the reference, 64 greedy steps. Slow.

9 query heads on 3 KV heads in 30 layers. fp32 against float64: where two scores nearly tie the
choice may differ. Up to the first such step logits agree; from then on what is kept is compared by
what is shared. Two files of tests share the policies, so that two workers share the time.
"""

from __future__ import annotations

import pytest
import torch
from smollm import needs_smollm
from test_real_model import _text
from zoo import EXAMPLES, truth

import sparsekv
from sparsekv.hf.compat import cache_key
from sparsekv.models import load
from sparsekv.policies import POLICIES

PROMPT, STEPS, BUDGET = 200, 64, 64

MARKS = [
    pytest.mark.slow,
    needs_smollm,
]


@pytest.fixture(scope="module")
def smollm():
    """(model in fp32 on the CPU, ids [1, 200] of running prose)."""
    model, tokenizer = load(None, device="cpu", dtype=torch.float32)
    try:
        text = _text("the-invisible-man", 20_000, 3_000)
    except FileNotFoundError:
        pytest.skip("needs the evaluation texts")
    return model, tokenizer(text, return_tensors="pt").input_ids[:, :PROMPT]


def differing(cache, wanted):
    """(keys of the reference that the cache lacks, keys of the reference); counts are equal."""
    differ, total = 0, 0
    for layer, heads in enumerate(wanted):
        for head, positions in enumerate(heads):
            held = set(cache.kept_positions(layer, head=head))
            assert len(held) == len(positions)
            differ, total = differ + len(set(positions) - held), total + len(positions)
    return differ, total


def check_64_steps(smollm, name):
    """Logits at every step of the reference's greedy text, and what is kept at its end."""
    if name not in POLICIES or name == "kvzip":
        pytest.skip("not in the library, or without a manual loop")
    model, ids = smollm
    policy = EXAMPLES[name](model.config.num_hidden_layers, model.config.num_key_value_heads)
    reference = truth(model, policy, BUDGET)
    sparsekv.patch(model, policy, BUDGET)
    try:
        cache, agreed = sparsekv.new_cache(model), True
        for _ in range(STEPS + 1):
            expected = reference.feed(ids)[-1]
            with torch.no_grad():
                step = {cache_key(model): cache, "use_cache": True}
                got = model(input_ids=ids, **step).logits[0, -1]
            if agreed:
                torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)
            differ, total = differing(cache, reference.kept())
            agreed = agreed and not differ
            assert differ <= 0.005 * total
            ids = expected.argmax(-1).view(1, 1)
    finally:
        sparsekv.unpatch(model)
