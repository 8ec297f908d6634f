"""DuoAttention: classes of heads from gates."""

from __future__ import annotations

import json

import pytest
from harness import shape

from sparsekv.policies import Duo, HeadPlan

GATES = ((0.1, 0.9), (0.5, 0.5), (0.5, 0.2))


@pytest.mark.parametrize(
    ("sparsity", "retrieval"),
    [
        (0.0, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]),
        (0.2, [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]),
        (0.4, [(0, 1), (1, 0), (1, 1), (2, 0)]),
        (0.5, [(0, 1), (1, 0), (1, 1)]),  # rank 2.5: of the equal gates the first ones
        (0.8, [(0, 1), (1, 0)]),
        (1.0, [(0, 1)]),
    ],
)
def test_classes(sparsity, retrieval):
    classes = Duo(GATES, sparsity).retrieval_heads()
    assert [(i, h) for i in range(3) for h in range(2) if classes[i][h]] == retrieval


@pytest.mark.parametrize(
    ("budget", "window"), [(1000, (320, 64, 256)), (100, (100, 50, 50)), (1, (1, 0, 1))]
)
def test_streaming_heads_hold_sinks_and_recent_tokens(budget, window):
    plans = Duo(GATES, 0.8).plan(shape(3, 4, 2), 5000, budget)
    assert plans[0].heads == (HeadPlan(*window), HeadPlan(None))
    assert plans[1].heads == (HeadPlan(None), HeadPlan(*window))
    assert {plan.decode for plan in plans} == {"replace"}


def test_without_gates_it_says_where_they_come_from():
    with pytest.raises(ValueError, match=r"expected Duo\(gates=.*calibrate_duo"):
        Duo().ready()
    with pytest.raises(ValueError, match="calibrate_duo"):
        Duo().plan(shape(), 10, 4)


def test_gates_of_another_model_are_refused():
    with pytest.raises(ValueError, match="expected gates for 2 layers of 2 KV heads, got 3 of 2"):
        Duo(GATES).plan(shape(2, 4, 2), 10, 4)


@pytest.mark.parametrize(
    "arguments",
    [
        {"gates": ()},
        {"gates": ((),)},
        {"gates": ((0.1,), (0.1, 0.2))},
        {"gates": ((1.5,),)},
        {"gates": ((float("nan"),),)},
        {"sparsity": 1.1},
        {"sinks": -1},
        {"recent": 0},
    ],
)
def test_bad_hyper_parameters(arguments):
    with pytest.raises(ValueError, match="expected"):
        Duo(**arguments)


def test_save_and_load(tmp_path):
    policy, file = Duo(GATES, 0.8, sinks=3, recent=9), tmp_path / "gates.json"
    policy.save(file)
    assert Duo.load(file) == policy and hash(Duo.load(file)) == hash(policy)
    assert Duo.load(file, sparsity=0.25) == Duo(GATES, 0.25, 3, 9)
    assert Duo.small_window(GATES) == Duo(GATES, sinks=16, recent=64)
    with pytest.raises(ValueError, match="expected Duo"):
        Duo().save(file)
    file.write_text(json.dumps([1, 2]))
    with pytest.raises(ValueError, match="expected a JSON object with gates"):
        Duo.load(file)
    published = tmp_path / "full_attention_heads.tsv"
    published.write_text("".join("\t".join(map(str, layer)) + "\n" for layer in GATES))
    assert Duo.load(published, sinks=5) == Duo(GATES, sinks=5)


@pytest.mark.parametrize("text", ["", "no", "{}", '{"gates": 3}', '{"gates": [["a"]]}'])
def test_files_that_hold_no_gates(tmp_path, text):
    """A user's mistake is a ValueError, whatever is wrong with the file."""
    for file in (tmp_path / "gates.json", tmp_path / "gates.tsv"):
        file.write_text(text or "a\tb\n")
        with pytest.raises(ValueError, match=r"expected .*gates"):
            Duo.load(file)
    with pytest.raises(ValueError, match="expected a JSON object with gates"):
        Duo.load(tmp_path / "none.json")


def test_a_misspelt_field_is_not_ignored(tmp_path):
    file = tmp_path / "gates.json"
    file.write_text(json.dumps({"gates": GATES, "sparsty": 0.3}))
    with pytest.raises(ValueError, match=r"expected the fields of Duo alone .* \['sparsty'\]"):
        Duo.load(file)
