"""What is measured: modes, each an engine of its own, and the workloads that all of them serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsekv.bench.case import Shape, name_of
from sparsekv.bench.serve.options import Choice
from sparsekv.bench.serve.workload import UNLIMITED, Workload

DENSE, FULL = "dense", "full"
SHAPES = ("llama-8b", "tiny")
_MOST_RUNNING = 256  # with Poisson arrivals nothing else bounds it; vLLM's own default elsewhere
_TINY: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 1 << 16,
}  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """One engine: who is measured, with what KV memory.

    contender: "dense" (vLLM without plugins), "full" (the plugin, asked for nothing), or a policy
    with its settings. kv_gib: KV memory of each GPU; None: what vLLM takes. engine: arguments of
    `vllm.AsyncEngineArgs`.
    """

    contender: str
    kv_gib: float | None
    engine: dict[str, Any]

    @property
    def sparse(self) -> bool:
        """Whether it needs the plugin."""
        return self.contender != DENSE

    def shape(self, workload: Workload) -> Shape:
        """The numbers of a case: those of the workload and the KV memory."""
        return {**workload.shape, "kv_gib": UNLIMITED if self.kv_gib is None else self.kv_gib}

    def case(self, workload: Workload) -> str:
        """Its name, the same for every mode that is compared."""
        return name_of(workload.what, self.shape(workload))


def modes(model: str, choice: Choice, shared: dict[str, Any]) -> list[Mode]:
    """A mode for each KV size and contender, in that order.

    shared: arguments of AsyncEngineArgs that every mode has. Raises ValueError for a policy that
    vLLM cannot serve, and where `shared` says otherwise than a policy needs.
    """
    found = []
    for kv_gib in choice.kv_sizes:
        memory = {} if kv_gib is None else {"kv_cache_memory_bytes": int(kv_gib * 2**30)}
        for name in choice.contenders:
            own = {} if name == DENSE else _plugin(model, name, choice)
            for key in sorted(set(own) & set(shared)):
                if own[key] != shared[key]:
                    raise ValueError(
                        f"expected --engine to leave {key} to {name}, which needs {own[key]!r}, "
                        f"got {shared[key]!r}"
                    )
            engine = {"model": model, **own, **shared, **memory}
            found.append(Mode(_label(name, choice), kv_gib, engine))
    return found


def server(label: str) -> Mode:
    """A server that somebody else has started, with the KV memory that it has."""
    return Mode(label, None, {})


def _plugin(model: str, policy: str, choice: Choice) -> dict[str, Any]:
    from sparsekv.vllm import llm_kwargs

    sparse = {} if policy == FULL else choice.sparse
    return llm_kwargs(model, policy=policy, budget=choice.budget, **sparse)


def _label(name: str, choice: Choice) -> str:
    if name in (DENSE, FULL):
        return name
    return " ".join([name, str(choice.budget), *(f"{k}={v}" for k, v in choice.sparse.items())])


def engine_arguments(
    workloads: Sequence[Workload], shape: str | None, on_gpu: bool, seed: int
) -> dict[str, Any]:
    """What every mode is started with; --engine overrides it.

    Prefix caching is off: random prompts would not hit, and evicted caches cannot be shared. Token
    ids are sent, so no tokenizer is loaded. As many requests run at once as memory allows.
    """
    running = max(w.concurrency or min(w.requests, _MOST_RUNNING) for w in workloads)
    arguments: dict[str, Any] = {
        "max_model_len": max(w.prompt_tokens + w.output_tokens for w in workloads),
        "max_num_seqs": running,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "seed": seed,
    }
    if shape is not None:
        arguments |= {"load_format": "dummy", "dtype": "bfloat16"}
    if not on_gpu:  # vLLM's compiled CPU code gives wrong text (0.32)
        arguments |= {"enforce_eager": True}
    return arguments


def write_shape(shape: str, folder: Path) -> None:
    """The config of a model with dummy weights. Raises ValueError for an unknown shape."""
    from transformers import LlamaConfig

    from sparsekv.bench.llama import llama_config

    if shape not in SHAPES:
        raise ValueError(f"expected --shape to be one of {', '.join(SHAPES)}, got {shape!r}")
    if shape == "tiny":
        LlamaConfig(**_TINY, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    else:
        llama_config(False).save_pretrained(folder)
