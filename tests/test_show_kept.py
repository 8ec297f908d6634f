"""Pictures of kept tokens: what is drawn is what the cache holds, on a tiny random model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import save_tiny_model
from typer.testing import CliRunner, Result

from sparsekv import cli, show_kept
from sparsekv.models import load
from sparsekv.policies import LayerSplit, SnapKV, Streaming

PNG = b"\x89PNG\r\n"
TOKENS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny(folder: Path) -> tuple[Any, Any, torch.Tensor]:
    """Model, tokenizer and a prompt [1, 60]."""
    model, tokenizer = load(str(folder), "cpu")
    return model, tokenizer, torch.randint(0, 256, (1, TOKENS), generator=torch.manual_seed(0))


def test_kept_is_what_the_policy_keeps(tiny: tuple[Any, Any, torch.Tensor]) -> None:
    kept = show_kept.kept_of(*tiny, Streaming(sinks=3), 20)
    assert kept.shape == (2, 2, TOKENS)
    for head in kept.reshape(4, TOKENS):
        assert np.flatnonzero(head).tolist() == [0, 1, 2, *range(TOKENS - 17, TOKENS)]
    kept = show_kept.kept_of(*tiny, SnapKV(window=4), 20)
    assert (kept.sum(2) == 20).all() and kept[..., -4:].all()
    assert (kept[0, 0] != kept[0, 1]).any()
    kept = show_kept.kept_of(*tiny, LayerSplit(full_layers=1), 0.25)
    assert kept[0].all() and (kept[1].sum(1) == 15).all()


def test_a_policy_by_name_gets_the_tokenizer(tiny: tuple[Any, Any, torch.Tensor]) -> None:
    assert show_kept.kept_of(*tiny, "kvzip", 0.5).sum() == 2 * 2 * TOKENS // 2


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("tokens", [1, 60, 3001])
def test_draws_a_png(by_head: bool, tokens: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "kept.png"
    show_kept.draw(np.ones((2, 2, tokens), dtype=bool), "title", out, by_head=by_head)
    assert out.read_bytes().startswith(PNG)


@pytest.mark.parametrize("tokens", [1, 999, 1000, 1001, 2500])
def test_dots_are_means_of_runs(tokens: int) -> None:
    """As many as fit, none empty, and weighed by their length they hold every token once."""
    rows = np.random.default_rng(0).random((3, tokens)) < 0.3
    dots = show_kept._dots(rows)
    assert dots.shape == (3, min(tokens, 1000)) and ((dots >= 0) & (dots <= 1)).all()
    assert (show_kept._dots(np.ones((1, tokens))) == 1).all()
    if tokens <= 1000:
        assert (dots == rows).all()
    if tokens == 2500:
        ends = np.linspace(0, tokens, 1001).astype(int)
        np.testing.assert_allclose(dots @ np.diff(ends), rows.sum(1))


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli.APP, ["show-kept", *(str(argument) for argument in arguments)])


def test_command(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    prompt, out = tmp_path / "prompt.txt", tmp_path / "kept.png"
    prompt.write_text("x" * TOKENS)
    size = ("--model", folder, "--device", "cpu", "--prompt", prompt, "--out", out)
    result = call("--policy", "h2o", "--budget", 24, *size, "--heads")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"h2o: 24 of {TOKENS} tokens per KV head on average\n"
    assert out.read_bytes().startswith(PNG)


def test_duo_with_gates_measured_on_a_text(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text, gates, out = (tmp_path / name for name in ("text.txt", "gates.json", "kept.png"))
    text.write_text("ab" * 200)
    measured = CliRunner().invoke(
        cli.APP, ["gates", "--texts", str(text), "--out", str(gates), "--model", str(folder)]
    )
    assert measured.exit_code == 0, measured.output
    where = ("--model", folder, "--device", "cpu", "--prompt", text, "--out", out)
    result = call("--policy", "duo", "--gates", gates, "--budget", 24, *where)
    assert result.exit_code == 0 and result.stdout.startswith("duo: "), result.output
    assert out.read_bytes().startswith(PNG)


def test_mistakes_are_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found before a model is loaded: a missing matplotlib, too."""
    monkeypatch.setattr(cli.models, "load", None)  # a call would raise TypeError
    mistakes = [
        (("--policy", "h3o"), "expected a Policy or one of full, "),
        (("--budget", "0"), "expected budget"),
        (("--policy", "h2o", "--gates", "g.json"), "expected --gates with --policy duo, got"),
        (("--prompt", tmp_path / "absent.txt"), "absent.txt': No such file or directory"),
        (("--out", tmp_path / "no" / "kept.png"), "expected --out in a folder that exists"),
        (("--out", tmp_path), "expected --out to be a file, got the folder"),
        (("--out", tmp_path / "kept.xyz"), "expected --out to end in .png, got "),
        (("--out", tmp_path / "kept"), "expected --out to end in .png, got "),
    ]
    for arguments, message in mistakes:
        assert_one_line(call(*arguments), message)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert_one_line(call(), "expected matplotlib for the picture (pip install 'sparsekv[plot]')")


def assert_one_line(result: Result, message: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert message in result.stderr and result.stdout == ""
