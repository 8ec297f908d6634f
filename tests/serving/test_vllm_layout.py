"""The layout and what it rests on, without vLLM: counts, the state of rows, settings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.vllm.layout import Layout, RowState, Slots
from sparsekv.vllm.settings import Settings, parse


@given(
    size=st.sampled_from([16, 32]),
    pinned=st.integers(1, 4),
    recent=st.integers(1, 100),
    grows=st.booleans(),
    prompt=st.integers(1, 300),
    new=st.integers(1, 100),
)
def test_rows_follow_the_layout(size, pinned, recent, grows, prompt, new) -> None:
    """A worker's rows hold what the scheduler's formula says, and what is recent stays."""
    layout = Layout(size, pinned, recent, grows)
    state, slot = RowState(layout, 3), np.array([1])
    state.advance(slot, np.array([0]), np.array([True]))
    for computed in range(prompt, prompt + new):
        before, now = state.advance(slot, np.array([computed]), np.array([False]))
        assert now[0] == layout.first_recent(prompt if grows else computed)
        assert pinned <= before[0] <= now[0]
        assert computed - now[0] * size >= min(recent, computed - pinned * size)
        held = -(-(computed + 1) // size) - (now[0] - pinned)
        assert held == layout.held_blocks(computed + 1, prompt)


@given(
    size=st.sampled_from([16, 32]),
    pinned=st.integers(1, 4),
    recent=st.integers(1, 100),
    grows=st.booleans(),
    chunks=st.lists(st.integers(1, 120), min_size=1, max_size=12),
    new=st.integers(1, 60),
)
def test_chunked_prompts_are_cut_at_every_chunk(size, pinned, recent, grows, chunks, new) -> None:
    """A worker's rows follow the formula; a scheduler that is a step late holds no more than it
    was told to admit."""
    layout = Layout(size, pinned, recent, grows, True)
    state, slot, prompt = RowState(layout, 3), np.array([1]), sum(chunks)
    state.advance(slot, np.array([9999]), np.array([False]))  # somebody else's, who is gone
    computed, held_from, freed = 0, pinned, pinned
    for step, count in enumerate([*chunks, *[1] * new]):
        if step:
            freed = max(freed, held_from)
        before, now = state.advance(slot, np.array([computed]), np.array([computed < prompt]))
        end = min(computed, prompt) if grows else computed
        assert now[0] == layout.first_recent(end) and before[0] == held_from
        held_from = int(now[0])
        computed += count
        if computed <= prompt or not grows:
            blocks = -(-computed // size) - (freed - pinned)
            assert blocks <= layout.most_blocks_read_chunked(max(chunks))


def test_a_prompt_holds_everything() -> None:
    layout = Layout(16, 2, 32, False)
    state = RowState(layout, 2)
    rows = np.array([0, 1])
    state.advance(rows, np.array([500, 500]), np.array([False, False]))
    before, now = state.advance(rows, np.array([512, 0]), np.array([False, True]))
    assert before.tolist() == [29, 2] and now.tolist() == [30, 2]


def test_slots_are_kept_and_given_again() -> None:
    slots = Slots(2)
    first = slots.of([7, 9], [0, 0]).tolist()
    assert sorted(first) == [0, 1] and slots.of([9, 7], [5, 5]).tolist() == first[::-1]
    assert slots.of([7], [6]).tolist() == first[:1]
    assert slots.of([7, 11], [7, 0]).tolist() == [first[0], first[1]]  # 9 is gone
    with pytest.raises(ValueError, match="at most 2 requests"):
        slots.of([1, 2, 3], [0, 0, 0])


def test_a_session_that_has_lost_its_slot() -> None:
    """Somebody else's state would be taken for its own; vLLM's warm-ups have no block at all."""
    slots = Slots(2)
    slots.of([0], [8])
    slots.of([7], [0])
    slots.of([9, 11], [0, 0])
    with pytest.raises(ValueError, match="one of 5 tokens whose state is gone"):
        slots.of([7], [5])


@pytest.mark.parametrize(
    ("entry", "pinned", "recent"),
    [
        ({"policy": "streaming", "budget": 1024}, 1, 992),
        ({"policy": "streaming", "budget": 384, "options": {"sinks": 128}}, 4, 256),
        ({"policy": "snapkv", "budget": 1024}, 31, 32),
        ({"policy": "layersplit", "budget": 1024}, 24, 256),
        ({"policy": "layersplit", "budget": 384, "recent": 256}, 4, 256),
        ({"policy": "tova", "budget": 1024}, 31, 32),
        ({"policy": "h2o", "budget": 1024}, 16, 512),
        ({"policy": "h2o", "budget": 1000, "options": {"heavy_fraction": 0.1}}, 3, 904),
        ({"policy": "h2o", "budget": 384, "recent": 256}, 4, 256),
    ],
)
def test_budgets(entry: dict, pinned: int, recent: int) -> None:
    layout = parse({"sparsekv": entry}).layout(32)
    assert (layout.pinned_blocks, layout.recent) == (pinned, recent)
    assert layout.pinned_blocks * 32 + layout.recent == entry["budget"]


def test_nothing_is_asked_for() -> None:
    assert parse({}) is None and parse(None) is None
    assert parse({"sparsekv": {"policy": "full"}}) is None


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ({"policy": "snapkv"}, "with budget"),
        ({"policy": "nope", "budget": 1}, "policy to be one of"),
        ({"policy": ["snapkv"], "budget": 512}, "policy to be one of"),
        ({"policy": {"snapkv": 1}, "budget": 512}, "policy to be one of"),
        ({"policy": "snapkv", "budget": 512, "options": None}, "options to be a mapping"),
        ({"policy": "snapkv", "budget": 512, "options": ["window"]}, "options to be a mapping"),
        ({"policy": "tova", "budget": 512, "options": {"window": 3}}, "options of tova"),
        ({"policy": "snapkv", "budget": 512, "options": {"tiers": 2}}, "options of snapkv"),
        (
            {"policy": "h2o", "budget": 512, "recent": 64, "options": {"heavy_fraction": 0.5}},
            "both",
        ),
        ({"policy": "pyramid", "budget": 512, "options": {"tiers": 1}}, "tiers"),
        ({"policy": "pyramid", "budget": 512, "options": {"rounding": "official"}}, "exact"),
        ({"policy": "snapkv", "budget": 0}, "budget"),
        ({"policy": "snapkv", "budget": 512, "window": 3}, "settings in"),
        ({"policy": "snapkv", "budget": 512, "prefill": "some"}, "prefill to be"),
        ({"policy": "snapkv", "budget": 512, "options": {"widow": 3}}, "options of snapkv"),
        ({"policy": "layersplit", "budget": 512, "options": {"accum": "sum"}}, "accum='ema'"),
        ({"policy": "streaming", "budget": 512, "options": {"positions": "cache"}}, "original"),
    ],
)
def test_settings_that_are_refused(entry: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse({"sparsekv": entry})


@pytest.mark.parametrize(
    "settings",
    [
        Settings("snapkv", 40, 3),
        Settings("snapkv", 512, 3, 100),
        Settings("h2o", 512, options={"heavy_fraction": 0.05}),
    ],
)
def test_budgets_of_broken_blocks(settings: Settings) -> None:
    with pytest.raises(ValueError, match="whole blocks of 32"):
        settings.layout(32)


@pytest.mark.parametrize("block_size", [0, -32, "32", 16.0, None, True])
def test_block_sizes_that_are_refused(block_size: object) -> None:
    with pytest.raises(ValueError, match="expected block_size to be an integer >= 1, got"):
        Settings("snapkv", 512).layouts(block_size)


@pytest.mark.parametrize(
    ("budget", "recent", "sinks", "fits"),
    [
        (1024, 960, 512, "recent=512 or budget=1472"),
        (256, 192, 65, "recent=160 or budget=288"),
        (128, 96, 128, "beside 96 recent ones of budget 128: budget=224"),
    ],
)
def test_all_sinks_are_pinned(budget: int, recent: int, sinks: int, fits: str) -> None:
    """As many as asked for, or a refusal that says what would pin them."""
    options = {"sinks": sinks}
    with pytest.raises(ValueError, match=f"expected room for {sinks} sinks, got .*{fits} would do"):
        Settings("streaming", budget, 1, recent, options=options).layout(32)
    enough = Settings("streaming", recent + 512, 1, recent, options=options).layout(32)
    assert enough.pinned_blocks * 32 == 512 >= sinks and enough.recent == recent
