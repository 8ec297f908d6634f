"""docs/policies.md: every policy says everything about itself, and the file says what they say."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparsekv import catalogue, cli
from sparsekv.policies import POLICIES, Policy, SnapKV

DOCS = Path(__file__).resolve().parents[1] / "docs"
every_policy = pytest.mark.parametrize("cls", POLICIES.values(), ids=POLICIES)


@every_policy
def test_states_its_facts(cls: type[Policy]) -> None:
    """In its own class, a line each; and a formula, indented in the docstring of its file."""
    for name, text in dataclasses.asdict(catalogue.facts_of(cls)).items():
        assert text.strip() == text and text and "\n" not in text, f"{cls.name}: {name}"
    assert catalogue.explanation(cls)
    assert cls.keeps and cls.paper


@every_policy
def test_its_section_is_up_to_date(cls: type[Policy]) -> None:
    text = (DOCS / "policies.md").read_text(encoding="utf-8")
    section = "\n".join(catalogue.section(cls))
    assert section in text, "run: sparsekv policies --markdown > docs/policies.md"


@every_policy
def test_its_picture_is_there(cls: type[Policy]) -> None:
    picture = DOCS / "kept" / f"{cls.name}.png"
    command = f"sparsekv show-kept --policy {cls.name} --budget 512 --out docs/kept/{cls.name}.png"
    assert picture.is_file(), f"run: {command}"


@every_policy
def test_other_tables_have_its_line(cls: type[Policy]) -> None:
    """That of the README, and the list that the first notebook prints."""
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    link, acts = f"[`{cls.name}`](docs/policies.md#{cls.name})", catalogue.facts_of(cls).acts
    assert f"| {link} | {cls.keeps} | {acts} |" in readme
    notebook = DOCS.parent / "experiments" / "notebooks" / "1_quick_start.ipynb"
    assert ", ".join(POLICIES) in notebook.read_text(encoding="utf-8")


def test_the_document_is_up_to_date() -> None:
    """Nothing in it that no policy says."""
    result = CliRunner().invoke(cli.APP, ["policies", "--markdown"])
    assert result.exit_code == 0, result.output
    assert result.stdout == catalogue.markdown()
    assert result.stdout == (DOCS / "policies.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("h2o", "heavy = floor(C * heavy_fraction)"),
        ("scissorhands", "m = max(1, floor(drop * C))"),
        ("keyformer", "recent = floor(C * recent_fraction)"),
        ("pyramidinfer", "the last 1 + R tokens with R = int(recent T)"),
        ("quest", "m_p and M_p are the channel-wise smallest and largest keys"),
    ],
)
def test_letters_of_a_formula_are_told(name: str, told: str) -> None:
    """They are in the docstring's text, not in the block that it indents."""
    text = " ".join("\n".join(catalogue.section(POLICIES[name])).split())
    assert told in text


def test_another_policys_facts_are_not_ones_own() -> None:
    @dataclass(frozen=True)
    class Silent(SnapKV):
        pass

    with pytest.raises(ValueError, match=r"expected `facts: ClassVar.Facts.` in Silent"):
        catalogue.facts_of(Silent)
    Silent.__module__ = __name__  # whose docstring has no indented block
    with pytest.raises(ValueError, match="expected an indented formula in the docstring of"):
        catalogue.explanation(Silent)


def test_what_a_section_holds() -> None:
    """Settings with their choices, presets, links, statistics in words."""
    text = "\n".join(catalogue.section(SnapKV))
    assert "| `group` | `'mean'` | `'mean', 'max', 'sum'` |" in text
    assert "| `window` | `32` | `int` |" in text
    assert "- `SnapKV.kvpress()`: NVIDIA kvpress: window 64" in text
    assert "[arXiv 2404.14469](https://arxiv.org/abs/2404.14469)" in text
    assert "prompt: sum of A over the last 32 rows, mean of a group's heads" in text
    duo, pruning = (
        "\n".join(catalogue.section(POLICIES[name])) for name in ("duo", "pyramidinfer")
    )
    assert "- `Duo.small_window(gates)`: 16 sinks" in duo and "Duo.load(" not in duo
    assert "- `PyramidInfer.published(size='7B')`: The released" in pruning
    decode = list(catalogue.statistics(POLICIES["layersplit"]()))
    assert decode[1] == "step: A of its row, mean of a group's heads"
