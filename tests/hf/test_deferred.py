"""Chunked prefill that evicts at its end keeps what one forward keeps, for every policy."""

from __future__ import annotations

import pytest
import torch
from rig import POLICIES, kept, patched, prompt, tiny_llama

from sparsekv.hf.compat import output_cache

_BUDGET, _NEW = 20, 8


def _generate(policy: str, chunk: int | None, lengths: list[int], **patch):
    model = patched(tiny_llama(), policy, _BUDGET, **patch)
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), None
    for row, length in enumerate(lengths):
        ids[row, width - length :] = prompt(length, seed=row)[0]
    if min(lengths) < width:
        mask = (ids != 0).long()
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=_NEW, do_sample=False,
        return_dict_in_generate=True, prefill_chunk_size=chunk,
    )  # fmt: skip
    return output.sequences, kept(output_cache(output))


@pytest.mark.parametrize("chunk", [7, 16, 57])
@pytest.mark.parametrize("policy", POLICIES)
def test_deferred_chunks_equal_one_forward(policy, chunk):
    """Also with a last chunk shorter than the observation window, and one longer than the rest."""
    tokens, held = _generate(policy, None, [58])
    deferred = _generate(policy, chunk, [58], defer_eviction=True)
    assert torch.equal(deferred[0], tokens)
    assert deferred[1] == held


@pytest.mark.parametrize("policy", POLICIES)
def test_deferred_chunks_of_a_padded_batch(policy):
    """Rows whose first chunks are padding."""
    tokens, held = _generate(policy, None, [58, 21])
    deferred = _generate(policy, 16, [58, 21], defer_eviction=True)
    assert torch.equal(deferred[0], tokens)
    assert deferred[1] == held


def test_without_it_every_chunk_evicts():
    """The default bounds what is cached, and may keep other tokens."""
    assert _generate("snapkv", 16, [58])[1] != _generate("snapkv", None, [58])[1]
