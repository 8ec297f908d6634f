"""Without lm-eval, or with one that does not work here, the command says what to install."""

from __future__ import annotations

import builtins
import sys

import pytest
from typer.testing import CliRunner

from sparsekv import lm_harness
from sparsekv.cli import APP


@pytest.fixture(params=[ImportError("no lm_eval"), AttributeError("no such model class")])
def broken(request, monkeypatch):
    real = builtins.__import__

    def importing(name, *args, **kwargs):
        if name.startswith("lm_eval"):
            raise request.param
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", importing)


def test_the_extra_is_named(broken):
    with pytest.raises(ValueError, match=r"lm-eval >= 0.4.10.*no .*pip install 'sparsekv\[eval\]'"):
        lm_harness.register()


def test_the_command_ends_with_one_line(broken):
    argv = list(sys.argv)
    result = CliRunner().invoke(APP, ["lm-eval", "--model", "sparsekv", "-h"])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: expected the package lm-eval")
    assert result.stderr.count("\n") == 1
    assert sys.argv == argv
