"""B66: models spread over devices. Each layer's pages, tables and scores live where it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import build, tiny
from rig import EVICTING, POLICIES, Run, greedy, kept, left_padded, patched, prompt, tiny_llama
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

import sparsekv
import sparsekv.hf.patch
from sparsekv.hf.check import layer_specs
from sparsekv.plan import LayerSpec

BUDGET = 24
BATCH = left_padded(prompt(60), prompt(41, 1))


def run(model: PreTrainedModel, **kwargs: Any) -> Run:
    ids, mask = (BATCH[name].to(model.device) for name in ("input_ids", "attention_mask"))
    return greedy(model, ids, 8, attention_mask=mask, **kwargs)


def assert_same(one: Run, other: Run, tolerance: float = 0.0) -> None:
    assert one.tokens.tolist() == other.tokens.tolist()
    torch.testing.assert_close(one.logits.cpu(), other.logits.cpu(), atol=tolerance, rtol=tolerance)
    for row in range(len(one.tokens)):
        assert kept(one.cache, row) == kept(other.cache, row)


# ---------------------------------------------------------------------- offloaded layers


@pytest.fixture(scope="module")
def offloaded(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """The tiny Llama with its second layer on disk, by accelerate's hooks."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {"lm_head": "cpu", "model.layers.0": "cpu", "model.layers.2": "cpu"}
    device_map = {**places, "model.layers.1": "disk"}
    model = AutoModelForCausalLM.from_pretrained(
        folder, device_map=device_map, offload_folder=folder / "offload"
    )
    return model.eval()


@pytest.mark.parametrize("policy", POLICIES)
def test_disk_offload(policy: str, offloaded: PreTrainedModel) -> None:
    """Weights that sit on "meta" between forwards change nothing; one store serves all layers."""
    assert any(parameter.device.type == "meta" for parameter in offloaded.parameters())
    assert {str(spec.device) for spec in layer_specs(offloaded)} == {"cpu"}
    got = run(patched(offloaded, policy, BUDGET))
    assert_same(got, run(patched(tiny_llama(), policy, BUDGET)))
    assert len(got.cache.state.stores) == 1
    sparsekv.unpatch(offloaded)


# ---------------------------------------------------------------------- where a layer runs


def gpt2() -> PreTrainedModel:
    config = transformers.GPT2Config(vocab_size=128, n_embd=64, n_layer=4, n_head=4)
    return transformers.GPT2LMHeadModel(config)


def opt() -> PreTrainedModel:
    return tiny("OPTConfig", ffn_dim=64, word_embed_proj_dim=64)


PLACES: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "llama": (lambda: build("llama"), "model.layers"),
    "qwen3_moe": (lambda: build("qwen3_moe"), "model.layers"),
    "gpt_oss": (lambda: build("gpt_oss"), "model.layers"),
    "phi": (lambda: tiny("PhiConfig"), "model.layers"),  # its output projection is `dense`
    "gpt2": (gpt2, "transformer.h"),  # c_proj
    "opt": (opt, "model.decoder.layers"),  # out_proj
}


@pytest.mark.parametrize("family", PLACES)
def test_layers_are_found_on_their_devices(family: str) -> None:
    """Whatever a family calls its projections. "meta" stands in for a second device."""
    make, layers = PLACES[family]
    model = make()
    for layer in (1, 3):
        model.get_submodule(layers)[layer].to("meta")
    devices = [spec.device.type for spec in layer_specs(model)]
    assert devices == ["cpu", "meta", "cpu", "meta"]


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers 1 and 2 are expected on "another" device; in truth both are the CPU."""

    def specs(model: PreTrainedModel) -> list[LayerSpec]:
        places = ["cpu", "cpu:0", "cpu:0"]
        one = layer_specs(model)
        return [LayerSpec(s.window, torch.device(p)) for s, p in zip(one, places, strict=True)]

    monkeypatch.setattr(sparsekv.hf.patch, "layer_specs", specs)
    yield


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 17}, {"num_beams": 3}])
@pytest.mark.parametrize("policy", EVICTING)
def test_two_stores(
    policy: str, options: dict[str, int], two_devices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of two devices, two stores with their own tables: the result of one store."""
    two = run(patched(tiny_llama(), policy, BUDGET), **options)
    monkeypatch.undo()
    one = run(patched(tiny_llama(), policy, BUDGET), **options)
    stores = two.cache.state.stores
    assert [len(store.lens) for store in stores] == [1, 2]
    assert len(one.cache.state.stores) == 1
    assert two.sequences.tolist() == one.sequences.tolist()
    for row in range(two.cache.state.store(0)[0].batch):
        assert kept(two.cache, row) == kept(one.cache, row)
    report, single = two.cache.report(), one.cache.report()
    assert (report.layers, report.pages_used) == (single.layers, single.pages_used)
    for store in stores:
        store.validate()
    two.cache.reset()
    assert two.cache.report().pages_used == 0


# ---------------------------------------------------------------------- no hard-coded device

_PACKAGE = Path(sparsekv.__file__).parent
_FACTORIES = {
    torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand,
    torch.randn, torch.tensor, torch.zeros,
}  # fmt: skip


class Homeless(TorchFunctionMode):
    """Notes every tensor that sparsekv makes without saying where."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and kwargs.get("device") is None:
            # Frame 1 is the caller, unless torch puts its own wrapper in between.
            caller = sys._getframe(1)
            while "/torch/" in caller.f_code.co_filename and caller.f_back is not None:
                caller = caller.f_back
            file = Path(caller.f_code.co_filename)
            if file.is_relative_to(_PACKAGE):
                self.found.add(f"{file.name}:{caller.f_lineno} {func.__name__}")
        return func(*args, **kwargs)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_tensor_says_where_it_lives(policy: str) -> None:
    with Homeless() as watch:
        torch.zeros(1)  # not ours
        model = patched(tiny_llama(), policy, BUDGET)
        run(model)
        run(model, prefill_chunk_size=17)
        run(model, num_beams=2)
    assert not watch.found


# ---------------------------------------------------------------------- two GPUs


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """First layer on one GPU, the others on the second, as device_map="balanced" would do."""
    from accelerate import dispatch_model

    places: dict[str, int] = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    places |= {"model.layers.1": 1, "model.layers.2": 1, "model.norm": 1, "lm_head": 1}
    return dispatch_model(model, device_map=places)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_two_gpus(policy: str) -> None:
    """Kernels run on the device of their layer, in replayed drafts too."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    shape = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    one = patched(tiny_llama(**shape).to("cuda:0"), policy, BUDGET)
    two = patched(spread(tiny_llama(**shape)), policy, BUDGET)
    want, got = run(one), run(two)
    assert_same(got, want, 1e-4)
    devices = [store.pool.k_pages.device.index for store in got.cache.state.stores]
    assert devices == [0, 1]
    for store in got.cache.state.stores:
        store.validate()
    repeated: Tensor = prompt(12).repeat(1, 4).cuda()
    drafted = [
        greedy(model, repeated, 8, prompt_lookup_num_tokens=3).tokens for model in (one, two)
    ]
    assert torch.equal(drafted[0].cpu(), drafted[1].cpu())
