"""Massive activations: what was planted is found, and nothing else."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from families import build
from rig import prompt, tiny_llama

import sparsekv
from sparsekv.diagnose import massive
from sparsekv.diagnose.massive_files import _largest, write_massive

TOKEN, FEATURE, VALUE = 7, 11, -5000.0


def planted():
    """A model whose embedding of one token has one huge number; layers add ordinary ones."""
    model = tiny_llama(1)
    model.model.embed_tokens.weight.data[TOKEN, FEATURE] = VALUE
    ids = prompt(30)
    ids[ids == TOKEN] = 8
    ids[0, [0, 12]] = TOKEN
    return model, ids


def test_finds_exactly_what_was_planted():
    model, ids = planted()
    seen = massive(model, ids, ratio=500.0)
    assert [(one.layer, one.position, one.feature) for one in seen.found] == [
        (layer, position, FEATURE) for layer in range(3) for position in (0, 12)
    ]
    assert seen.positions == (0, 12)
    assert all(one.value == pytest.approx(VALUE, rel=0.01) for one in seen.found)
    assert massive(model, ids, magnitude=6000.0).found == ()
    assert massive(model, ids, ratio=1e7).found == ()


def test_figures_are_those_of_the_hidden_states():
    """As `output_hidden_states` gives them; the last of those is behind the final norm."""
    model, ids = planted()
    seen = massive(model, ids, layer=1)
    with torch.no_grad():
        states = model(ids, output_hidden_states=True, use_cache=False).hidden_states[1:-1]
    assert seen.top.shape == (3, 3) and seen.median.shape == (3,)
    for layer, h in enumerate(states):
        size = h[0].abs()
        assert seen.top[layer].tolist() == pytest.approx(size.flatten().topk(3).values.tolist())
        assert seen.median[layer] == pytest.approx(float(size.median()))
    assert seen.shown == 1
    np.testing.assert_allclose(seen.table, states[1][0].abs().numpy(), rtol=1e-6)


def test_both_thresholds_count():
    """> 100 in size and at least `ratio` times the median of the layer."""
    model, ids = planted()
    low = massive(model, ids, magnitude=0.0, ratio=3.0)
    for layer in range(3):
        limit = 3.0 * low.median[layer]
        own = [one for one in low.found if one.layer == layer]
        assert own and min(abs(one.value) for one in own) >= limit * (1 - 1e-6)
    assert len(low.found) > 6
    assert low.shown == int(low.top[:, 0].argmax())


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mixtral", "qwen2-mixed"])
def test_other_families_and_patched_models(family):
    """Sliding layers, experts; hooks go away again, and a patch changes nothing."""
    model = build(family).train()
    before = massive(model, prompt(20))
    assert model.training and len(before.median) == 4
    assert not any(layer._forward_hooks for layer in model.model.layers)
    sparsekv.patch(model.eval(), "snapkv", 8)
    after = massive(model, prompt(20))
    np.testing.assert_allclose(after.top, before.top, rtol=1e-4)


def test_files(tmp_path):
    pytest.importorskip("matplotlib")
    model, ids = planted()
    seen = massive(model, ids, ratio=500.0)
    files = write_massive(seen, [f"t{i},\n" for i in range(30)], tmp_path)
    names = ["massive.csv", "massive_layers.csv", "massive_layers.png"]
    assert [file.name for file in files] == [*names, f"massive_layer_{seen.shown}.png"]
    layers = list(csv.DictReader(files[1].open(newline="")))
    assert [row["massive"] for row in layers] == ["2", "2", "2"]
    assert float(layers[0]["median"]) == pytest.approx(seen.median[0], rel=1e-5)
    found = list(csv.DictReader(files[0].open(newline="")))
    assert found[1]["token"] == "t12,\n" and float(found[1]["value"]) == pytest.approx(VALUE, 0.01)
    assert int(found[1]["times_median"]) == pytest.approx(5000 / seen.median[0], rel=0.01)
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files[2:])


def test_dots_of_a_picture_keep_the_largest():
    table = np.zeros((1000, 3000))
    table[517, 2999] = 7.0
    dots = _largest(table, 96, 512)
    assert dots.shape == (96, 512) and dots.max() == dots[:, -1].max() == 7.0
    assert (_largest(table[:5, :6], 96, 512) == table[:5, :6]).all()


@pytest.mark.parametrize("settings", [{"layer": 3}, {"layer": -1}, {"magnitude": -1.0}])
def test_settings_that_make_no_sense(settings):
    with pytest.raises(ValueError, match=r"expected .*, got "):
        massive(tiny_llama(), prompt(8), **settings)
    with pytest.raises(ValueError, match="expected ids of one text"):
        massive(tiny_llama(), prompt(8)[0])


def test_a_model_that_overflows_is_told():
    """Nothing is larger than NaN, so no massive activation would be found."""
    model, ids = planted()
    model.model.layers[1].mlp.down_proj.weight.data[0] = float("nan")
    with pytest.raises(ValueError, match="expected numbers behind layer 1, got NaN"):
        massive(model, ids)
    for settings in ({"magnitude": float("nan")}, {"ratio": float("nan")}):
        with pytest.raises(ValueError, match="expected thresholds >= 0"):
            massive(model, ids, **settings)
