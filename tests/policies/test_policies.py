"""What holds for every policy, whatever it ranks by."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from harness import (
    features_of,
    prefill,
    protected,
    shape,
    slots_after_prompt,
)
from hypothesis import given
from hypothesis import strategies as st
from zoo import EXAMPLES, TENSOR_PARALLEL

from sparsekv.policies import (
    H2O,
    POLICIES,
    LayerSplit,
    Policy,
    Pyramid,
    Quest,
    SnapKV,
    Stats,
    Streaming,
    get_policy,
)

# Their plans speak of heads, pages, the whole model or hidden states: see tests/hf/test_zoo.py.
OF_THEIR_OWN = ("duo", "quest", "kvzip", "pyramidinfer", "planned")
NAMES = [name for name in POLICIES if name not in OF_THEIR_OWN]
VARIANTS = (
    [POLICIES[name]() for name in NAMES]
    + [EXAMPLES[name](5, 2) for name in NAMES]
    + [
        Streaming(sinks=1, positions="cache"),
        H2O(heavy_fraction=1.0),
        SnapKV.kvpress(),
        SnapKV(window=3, kernel=5, pool="avg", group="max"),
        Pyramid(window=2),
        LayerSplit(full_layers=0, window_rows=4, pool="max"),
        LayerSplit(full_layers=1, recent=2, accum="sum"),
    ]
)
VARIANTS = list(dict.fromkeys(VARIANTS))
every_policy = pytest.mark.parametrize("policy", VARIANTS, ids=repr)
quiet = pytest.mark.filterwarnings("ignore:pyramid gives all")


def random_probabilities(tokens, seed, heads=4):
    logits = 4 * torch.randn(heads, tokens, tokens, generator=torch.Generator().manual_seed(seed))
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1)


def attend_at_random(seed, heads=4):
    generator = torch.Generator().manual_seed(seed)
    return lambda held: torch.randn(heads, held.shape[-1], generator=generator).softmax(-1)


@quiet
@every_policy
@given(layers=st.integers(1, 40), tokens=st.integers(1, 3000), budget=st.integers(1, 3000))
def test_plans(policy, layers, tokens, budget):
    plan = policy.plan(shape(layers), tokens, budget)
    assert len(plan) == layers
    for layer in plan:
        if layer.budget is None:
            assert (layer.sinks, layer.recent, layer.decode) == (0, 0, "grow")
            continue
        left, low = slots_after_prompt(layer), getattr(layer, "low", None)
        assert 1 <= left <= layer.budget
        assert low is None or (1 <= low <= layer.budget and layer.decode == "interval")
        assert min(layer.sinks, layer.recent) >= 0
        assert layer.sinks + layer.recent <= min(left, low or left)
        assert tokens > budget or left >= tokens  # within budget: all kept


@quiet
@every_policy
@given(
    tokens=st.integers(1, 40), budget=st.integers(1, 24), layer=st.integers(0, 4), data=st.data()
)
def test_kept_set_contains_the_protected_and_fills_the_budget(policy, tokens, budget, layer, data):
    seed = data.draw(st.integers(0, 2**16))
    probabilities = random_probabilities(tokens, seed)
    row = prefill(policy, probabilities, budget, num_kv_heads=2, num_layers=5, layer=layer)
    held = min(tokens, slots_after_prompt(row.plan) or tokens)
    everything = torch.arange(tokens)
    must = set(everything[protected(everything, row.plan, tokens)].tolist())
    assert sum(len(set(kept)) for kept in row.kept()) == 2 * held
    for kept in row.kept():
        assert policy.ragged or len(set(kept)) == held
        assert must <= set(kept)


@quiet
@every_policy
@given(tokens=st.integers(1, 20), budget=st.integers(1, 10), seed=st.integers(0, 2**16))
def test_decoding_never_holds_more_than_planned_and_keeps_the_newest(policy, tokens, budget, seed):
    row = prefill(
        policy, random_probabilities(tokens, seed), budget, num_kv_heads=2, num_layers=5, layer=4
    )
    attend, plan = attend_at_random(seed), row.plan
    held = [len(kept) for kept in row.kept()]
    for token in range(tokens, tokens + 12):
        row.decode(token, attend)
        held = [after_step(plan, n) for n in held]
        assert [len(set(kept)) for kept in row.kept()] == held
        for kept in row.kept():
            newest = range(token + 1)[-row.plan.recent :] if row.plan.recent else []
            assert set(newest) <= set(kept)
            # One that replaces attends its newest token, even if nothing is protected.
            assert token in kept or plan.decode in ("evict", "interval")


def after_step(plan, held):
    """Slots in use after a step that found `held`."""
    if plan.decode == "grow" or held < plan.budget:
        return held + 1
    return plan.low if plan.decode == "interval" else plan.budget


def stats_of(policy, tokens, fill):
    plan = policy.plan(shape(5), tokens, 4)[4]
    scores = torch.full((1, 2, tokens), fill)
    positions = torch.arange(tokens, dtype=torch.int32).expand(1, 2, -1)
    lengths = torch.full((1, 2), tokens, dtype=torch.int32)
    features = features_of(policy, 4, "prefill", positions, 0)
    even = {feature: torch.full((1, 2, tokens), max(fill, 0.0)) for feature in features}
    return Stats(scores, scores, positions, lengths, torch.tensor([plan.recent]), even)


@quiet
@every_policy
@pytest.mark.parametrize("fill", [0.0, 0.125, -torch.inf])
def test_equal_scores_keep_the_newest(policy, fill):
    # Attention spread evenly, or a masked statistic: no infinity times zero, no arbitrary choice.
    scores = policy.score(4, stats_of(policy, 12, fill))
    assert scores.shape == (1, 2, 12)
    assert scores.dtype == torch.float32
    assert not scores.isnan().any()
    uniform = torch.full((4, 12, 12), fill)
    row = prefill(policy, uniform, 4, num_kv_heads=2, num_layers=5, layer=4)
    sinks = list(range(row.plan.sinks))
    by_features = policy.name == "random" or features_of(policy, 4, "prefill", row.positions, 0)
    # Averages count the zeros beyond the ends; scissorhands' blocks leave less than the budget.
    if slots_after_prompt(row.plan) == 4 and "avg" not in repr(policy) and not by_features:
        assert row.kept() == [[*sinks, *range(8 + len(sinks), 12)]] * 2


@every_policy
def test_a_row_scores_the_same_in_a_ragged_batch(policy):
    # Row 0 has 9 keys and 7 columns of padding that hold NaN, row 1 has 16.
    recent = torch.tensor([2, 3], dtype=torch.int32)
    lengths = torch.tensor([[9, 9], [16, 16]], dtype=torch.int32)
    columns = torch.rand(2, 2, 16, generator=torch.Generator().manual_seed(3))
    columns[0, :, 9:] = torch.nan
    positions = torch.arange(16, dtype=torch.int32).expand(2, 2, -1)
    features = features_of(policy, 4, "prefill", positions, 5)
    for table in features.values():
        table[0, :, 9:] = torch.nan
    stats = Stats(columns, columns, positions, lengths, recent, features)
    together = policy.score(4, stats)
    for row, n in enumerate((9, 16)):
        one = (slice(row, row + 1), slice(None), slice(n))
        rows = slice(row, row + 1)
        of_row = {feature: table[one] for feature, table in features.items()}
        stats = Stats(
            columns[one], columns[one], positions[one], lengths[rows], recent[rows], of_row
        )
        torch.testing.assert_close(together[one], policy.score(4, stats), rtol=0, atol=0)


@every_policy
def test_needs_and_state_agree(policy):
    for phase in ("prefill", "decode"):
        assert not policy.stateful or policy.needs(4, phase) is not None
    state = torch.rand(1, 2, 6)
    positions = torch.arange(6, dtype=torch.int32).expand(1, 2, -1)
    observed = policy.observe(4, "decode", state, torch.zeros_like(state), positions)
    assert observed.shape == state.shape
    assert (observed is state) or policy.stateful


@every_policy
def test_policies_are_values(policy):
    assert policy == dataclasses.replace(policy)
    assert len({policy, dataclasses.replace(policy)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.group = "max"


def test_registry():
    assert list(POLICIES)[:6] == ["full", "streaming", "h2o", "snapkv", "pyramid", "layersplit"]
    assert set(POLICIES) <= set(EXAMPLES)  # tests/zoo.py
    for name, cls in POLICIES.items():
        assert cls.name == name
        assert cls.keeps and cls.paper and cls.__doc__
        assert get_policy(name) == cls()
    with pytest.raises(TypeError):
        POLICIES["mine"] = Policy
    policy = SnapKV(window=4)
    assert get_policy(policy) is policy


@pytest.mark.parametrize("name", POLICIES)
def test_what_ranks_would_have_to_share(name):
    """A policy that ranks over heads of other ranks says so, and is refused there."""
    assert POLICIES[name]().tensor_parallel == TENSOR_PARALLEL[name]


@pytest.mark.parametrize("wrong", ["SnapKV", "", None, SnapKV, 3])
def test_unknown_policies_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=", ".join(POLICIES) + ", got"):
        get_policy(wrong)


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (Streaming, {"sinks": -1}),
        (Streaming, {"sinks": 1.0}),
        (Streaming, {"positions": "slot"}),
        (H2O, {"heavy_fraction": 1.01}),
        (H2O, {"heavy_fraction": float("nan")}),
        (H2O, {"group": "layer_mean"}),
        (SnapKV, {"window": 0}),
        (SnapKV, {"window": True}),
        (SnapKV, {"kernel": 4}),
        (SnapKV, {"pool": "median"}),
        (SnapKV, {"group": "none"}),
        (Pyramid, {"window": 0}),
        (Pyramid, {"beta": 1}),
        (Pyramid, {"rounding": "floor"}),
        (LayerSplit, {"full_layers": -1}),
        (LayerSplit, {"window_rows": 0}),
        (LayerSplit, {"recent": -1}),
        (LayerSplit, {"accum": "mean"}),
        (LayerSplit, {"pool": "max", "kernel": 2}),
        (LayerSplit, {"budget_is": "total"}),
        (Quest, {"dense_layers": -1}),
    ],
)
def test_bad_hyper_parameters(cls, arguments):
    with pytest.raises(ValueError, match=r"expected .*, got "):
        cls(**arguments)


FRACTIONS = [
    (cls, field.name)
    for cls in POLICIES.values()
    for field in dataclasses.fields(cls)
    if str(field.type).startswith("float")
]


@pytest.mark.parametrize("wrong", ["a", (), True, float("nan"), float("inf"), -0.1], ids=repr)
@pytest.mark.parametrize(("cls", "name"), FRACTIONS)
def test_numbers_are_numbers(cls, name, wrong):
    with pytest.raises(ValueError, match=rf"expected {name} .*, got "):
        cls(**{name: wrong})


def test_the_limits_of_a_number_are_named():
    with pytest.raises(ValueError, match=r"^expected heavy_fraction between 0 and 1, got 'a'$"):
        H2O(heavy_fraction="a")
    with pytest.raises(ValueError, match=r"^expected every gate between 0 and 1, got 'a'$"):
        POLICIES["duo"](gates=(("a",),))
    with pytest.raises(ValueError, match=r"^expected epsilon >= 0, got None$"):
        POLICIES["expected"](epsilon=None)
    assert H2O(heavy_fraction=1) == H2O(heavy_fraction=1.0)


def test_observe_without_decay_is_refused():
    """A kernel would go on doing what the class above declared, and nobody would notice."""
    with pytest.raises(TypeError, match=r"expected Half to say with decay\(\)"):

        class Half(H2O):
            def observe(self, layer, phase, state, columns, positions):
                return state / 2 + columns


@pytest.mark.parametrize("value", ["false", None, 1])
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("adakv", "normalise"),
        ("expected", "covariance"),
        ("expected", "value_norm"),
        ("kvzip", "uniform"),
    ],
)
def test_a_flag_is_true_or_false(name, setting, value):
    """The text "false" of a file or a command line would have switched it on."""
    with pytest.raises(ValueError, match=f"expected {setting} to be True or False, got"):
        POLICIES[name](**{setting: value})


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (LayerSplit(), "layersplit keeps everything: full_layers=3 in a model of 3"),
        (LayerSplit(full_layers=9, budget_is="average"), "layersplit keeps everything"),
        (Quest(dense_layers=3), "quest attends everything: dense_layers=3 in a model of 3"),
    ],
)
def test_dense_in_all_layers_is_not_silent(policy, message):
    """As by default in models with few layers of full attention among sliding ones."""
    with pytest.warns(UserWarning, match=message):
        policy.plan(shape(3), 100, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy.plan(shape(3), 40, 40)
        policy.plan(shape(10), 40, 40)
