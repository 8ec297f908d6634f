"""Options of the command line that are lists or objects, read and checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeVar

from sparsekv.bench.serve.workload import UNLIMITED, Length, Workload, closed, poisson
from sparsekv.options import json_object

Number = TypeVar("Number", int, float)
_LENGTH = re.compile(r"(\d+)/(\d+)(?:@(\d+))?")
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

    @classmethod
    def read(
        cls, names: str, kv_gib: str, budget: int, sparse: str, engine: dict[str, Any]
    ) -> Choice:
        """From the texts of the options. Raises ValueError for what they cannot mean."""
        more = json_object(sparse, "--sparse")
        return cls(words(names), kv_sizes(kv_gib), budget, more, engine)

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


def lengths(text: str) -> list[Length]:
    """ "4000/500,16000/500@8" -> [(4000, 500, None), (16000, 500, 8)]; else ValueError."""
    found = [_LENGTH.fullmatch(word) for word in words(text)]
    if not found or None in found:
        raise ValueError(f"expected --lengths like 4000/500,32000/500@8, got {text!r}")
    return [
        Length(int(match[1]), int(match[2]), None if match[3] is None else int(match[3]))
        for match in found
        if match is not None
    ]


def kv_sizes(text: str) -> list[float | None]:
    """ "6,unlimited" -> [6, None], in GiB. Raises ValueError otherwise."""
    known = [word for word in words(text) if word != UNLIMITED]
    sizes = dict(zip(known, numbers(",".join(known), float, "--kv-gib"), strict=True))
    if not words(text) or not all(0 < size < float("inf") for size in sizes.values()):
        raise ValueError(f"expected --kv-gib like 6,unlimited, got {text!r}")
    return [None if word == UNLIMITED else _short(sizes[word]) for word in words(text)]


def workloads(
    length: str, concurrency: str, rounds: int, ramp: float, rates: str, requests: int
) -> list[Workload]:
    """All closed loops, then all Poisson arrivals.

    Raises:
        ValueError: nothing of either, or rates without a length to go with.
    """
    found = lengths(length)
    clients = numbers(concurrency, int, "--concurrency")
    a_second = [_short(rate) for rate in numbers(rates, float, "--rates")]
    if a_second and all(own is not None for _, _, own in found):
        raise ValueError(f"expected a length without @ for --rates {rates}, got {length!r}")
    loops = list(closed(found, clients, rounds, _short(ramp)))
    every = [*loops, *poisson(found, a_second, requests)]
    if not every:
        raise ValueError("expected --concurrency or --rates, got neither")
    return every


def _short(value: float) -> float:
    """6.0 is 6, so that names of cases are short."""
    return int(value) if value.is_integer() else value
