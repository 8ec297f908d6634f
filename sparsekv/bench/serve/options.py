"""Options of the command line that are lists or objects, read and checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar

from sparsekv.bench.serve.workload import UNLIMITED, Workload, closed, poisson

Number = TypeVar("Number", int, float)
# What has an option of its own.
RESERVED = {"model", "policy", "budget", "seed", "kv_cache_memory_bytes", "worker_extension_cls"}


@dataclass(frozen=True)
class Choice:
    """Which engines are started.

    contenders: "dense", "full" or names of policies. kv_sizes: GiB a GPU; None: what vLLM takes.
    budget: tokens a KV head. sparse: more arguments of `sparsekv.vllm.llm_kwargs`. engine: those of
    vLLM's AsyncEngineArgs, for every mode.
    """

    contenders: list[str]
    kv_sizes: list[float | None]
    budget: int
    sparse: dict[str, Any]
    engine: dict[str, Any]

    def __post_init__(self) -> None:
        if not self.contenders:
            raise ValueError("expected --modes like dense,layersplit, got none")
        for option, given in (("--engine", self.engine), ("--sparse", self.sparse)):
            if reserved := sorted(RESERVED & set(given)):
                raise ValueError(f"expected {option} without {', '.join(reserved)}")


def words(text: str) -> list[str]:
    """ "a, b" -> ["a", "b"], each once; "" -> []."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def numbers(text: str, kind: type[Number], option: str) -> list[Number]:
    """ "1,5" -> [1, 5]. Raises ValueError, naming the option, for what are no numbers."""
    try:
        return [kind(word) for word in words(text)]
    except ValueError as error:
        raise ValueError(f"expected {option} to be numbers like 1,2,4, got {text!r}") from error


def lengths(text: str) -> list[tuple[int, int]]:
    """ "4000/500,16000/500" -> [(4000, 500), (16000, 500)]. Raises ValueError otherwise."""
    try:
        pairs = [tuple(map(int, word.split("/"))) for word in words(text)]
    except ValueError:
        pairs = []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"expected --lengths like 4000/500,16000/500, got {text!r}")
    return [(prompt, new) for prompt, new in pairs]


def kv_sizes(text: str) -> list[float | None]:
    """ "6,unlimited" -> [6, None], in GiB. Raises ValueError otherwise."""
    known = [word for word in words(text) if word != UNLIMITED]
    sizes = dict(zip(known, numbers(",".join(known), float, "--kv-gib"), strict=True))
    if not words(text) or not all(0 < size < float("inf") for size in sizes.values()):
        raise ValueError(f"expected --kv-gib like 6,unlimited, got {text!r}")
    return [None if word == UNLIMITED else _short(sizes[word]) for word in words(text)]


def json_object(text: str, option: str) -> dict[str, Any]:
    """'{"a": 1}' -> {"a": 1}. Raises ValueError, naming the option, for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"expected {option} to be a JSON object, got {text!r}")
    return value


def workloads(
    length: str, concurrency: str, rates: str, requests: int | None, ramp: float
) -> list[Workload]:
    """All closed loops, then all Poisson arrivals. Raises ValueError if that is nothing."""
    pairs = lengths(length)
    clients = numbers(concurrency, int, "--concurrency")
    a_second = [_short(rate) for rate in numbers(rates, float, "--rates")]
    found = [*closed(pairs, clients, requests, _short(ramp)), *poisson(pairs, a_second, requests)]
    if not found:
        raise ValueError("expected --concurrency or --rates, got neither")
    return found


def _short(value: float) -> float:
    """6.0 is 6, so that names of cases are short."""
    return int(value) if value.is_integer() else value
