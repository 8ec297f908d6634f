"""The manager of blocks, driven as vLLM's scheduler does, against the layout's formula."""

from __future__ import annotations

import numpy as np
import torch
from engines import needs_vllm
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.vllm.layout import Layout, RowState

pytestmark = needs_vllm

SIZE, POOL = 4, 200
layouts = st.builds(
    Layout,
    st.just(SIZE),
    pinned_blocks=st.integers(1, 3),
    recent=st.integers(1, 14),
    grows=st.booleans(),
    chunked=st.booleans(),
)


def manager_of(layout: Layout):
    """A manager of a pool of its own."""
    from vllm.v1.core.block_pool import BlockPool

    from sparsekv.vllm.spec import PinnedWindowManager, PinnedWindowSpec

    spec = PinnedWindowSpec(
        block_size=SIZE, num_kv_heads=1, head_size=16, dtype=torch.float32,
        sliding_window=layout.recent, pinned_tokens=layout.pinned_blocks * SIZE,
        grows=layout.grows, chunk=8 if layout.chunked else 0,
    )  # fmt: skip
    pool = BlockPool(POOL, enable_caching=False, hash_block_size=SIZE)
    return PinnedWindowManager(spec, pool, False, 0, SIZE), pool


class Asked:
    """A request, and where the layout says that its blocks are gone."""

    def __init__(self, name: str, prompt: int) -> None:
        self.name, self.prompt, self.again = name, prompt, prompt
        self.computed, self.last = 0, 0  # tokens cached; tokens cached before the last step

    def gone(self, layout: Layout) -> range:
        """Blocks that its last step did not hold any more."""
        if self.last < self.again and not layout.chunked:
            return range(0)
        end = min(self.last, self.prompt) if layout.grows else self.last
        return range(layout.pinned_blocks, layout.first_recent(end))

    def preempt(self) -> None:
        """All that it had, and the token sampled last, is read again."""
        self.again, self.computed, self.last = max(self.again, self.computed + 1), 0, 0


def step(manager, pool, asked: Asked, tokens: int) -> None:
    """One step of a request, as `allocate_slots` has it."""
    end = asked.computed + tokens
    manager.remove_skipped_blocks(asked.name, asked.computed, num_prompt_tokens=asked.prompt)
    wanted = manager.get_num_blocks_to_allocate(
        asked.name, end, [], asked.computed, asked.computed, end
    )
    free = pool.get_num_free_blocks()
    new = manager.allocate_new_blocks(asked.name, end, end)
    assert len(new) == wanted == free - pool.get_num_free_blocks()


@given(
    layout=layouts,
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    chunk=st.integers(1, 9),
    new=st.integers(0, 60),
    preempted=st.integers(0, 80),
)
def test_blocks_held(layout, prompts, chunk, new, preempted) -> None:
    manager, pool = manager_of(layout)
    free = pool.get_num_free_blocks()
    every = [Asked(str(i), prompt) for i, prompt in enumerate(prompts)]
    for i in range(max(prompts) + new):
        for asked in every:
            if i == preempted and asked.name == "0":
                pool.free_blocks(manager.pop_blocks_for_free("0"))
                asked.preempt()
            left = asked.again - asked.computed
            tokens = min(chunk, left) if left > 0 else 1
            step(manager, pool, asked, tokens)
            blocks = manager.req_to_blocks[asked.name]
            null = [j for j, block in enumerate(blocks) if block.is_null]
            assert null == list(asked.gone(layout))
            assert len(blocks) == -(-(asked.computed + tokens) // SIZE)
            asked.last, asked.computed = asked.computed, asked.computed + tokens
    for asked in every:
        pool.free_blocks(manager.pop_blocks_for_free(asked.name))
    assert pool.get_num_free_blocks() == free and not manager._progress


@given(
    layout=layouts,
    turns=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=2, max_size=4),
    chunk=st.integers(1, 9),
    ahead=st.booleans(),
)
def test_sessions(layout, turns, chunk, ahead) -> None:
    """Inputs that come one by one, whose prompt grows: the worker's rows hold what the manager
    does. Not a block goes that is read, nor one that only the first prompt's end would let go.

    ahead: one step more than the answer wants is run in each turn, and dropped.
    """
    manager, pool = manager_of(layout)
    free = pool.get_num_free_blocks()
    asked, state, slot = Asked("s", 0), RowState(layout, 2), np.array([1])
    now, first, dropped = layout.pinned_blocks, None, False
    for length, new in turns:
        asked.prompt = asked.again = end = asked.computed + length
        steps = [min(chunk, end - i) for i in range(asked.computed, end, chunk)]
        for tokens in steps + [1] * (new - 1 + ahead):
            step(manager, pool, asked, tokens)
            blocks = manager.req_to_blocks["s"]
            gone = [j for j, block in enumerate(blocks) if block.is_null]
            if dropped:  # it may be a step later still
                assert gone == list(range(layout.pinned_blocks, layout.pinned_blocks + len(gone)))
                assert layout.pinned_blocks + len(gone) <= now
            else:
                assert gone == list(range(layout.pinned_blocks, now))
            prefilling = np.array([asked.computed < asked.prompt])
            before, after = state.advance(slot, np.array([asked.computed]), prefilling)
            assert before[0] == now <= after[0]
            now = int(after[0])
            if first is None and not prefilling[0]:
                first = asked.computed
            if first is not None and not layout.grows:
                assert now >= layout.first_recent(asked.computed)
            if first is not None and layout.grows:
                assert now == layout.first_recent(first)
            asked.last, asked.computed = asked.computed, asked.computed + tokens
        asked.computed -= ahead
        dropped = ahead
    pool.free_blocks(manager.pop_blocks_for_free("s"))
    assert pool.get_num_free_blocks() == free and not manager._progress
