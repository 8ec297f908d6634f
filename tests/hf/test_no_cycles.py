"""Nothing that is made for a prompt waits for Python's garbage collection.

A reference cycle per layer holds the layer's queries and keys until a collection happens to run:
gigabytes beside a cache that is small.
"""

import gc

import pytest
import torch
from rig import prompt, tiny_llama
from zoo import NAMES, example

import sparsekv

TOKENS, BUDGET = 90, 48


def in_cycles(run):
    """Shapes of the tensors that only a garbage collection frees after run()."""
    gc.collect()
    gc.disable()
    try:
        run()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return [tuple(x.shape) for x in gc.garbage if isinstance(x, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:pyramid gives all")
@pytest.mark.parametrize("chunk", [None, 40])
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_leaves_no_tensor_in_a_cycle(name, chunk):
    if name == "pyramidinfer" and chunk:
        pytest.skip("refuses a prompt in chunks")
    model = tiny_llama(0)
    config = model.config
    policy = example(name, config.num_hidden_layers, config.num_key_value_heads)
    patched = sparsekv.patch(model, policy, BUDGET)
    ids = prompt(TOKENS)

    def run():
        patched.generate(
            ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, prefill_chunk_size=chunk
        )

    run()  # what is made once per model
    assert in_cycles(run) == []


def test_the_search_finds_a_cycle():
    def run():
        held = [torch.zeros(3, 5)]
        held.append(held)

    assert in_cycles(run) == [(3, 5)]
