"""One workload: how many requests, of what length, arriving when."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from sparsekv.bench.case import Shape

CLOSED, POISSON = "closed loop", "Poisson arrivals"
UNLIMITED = "unlimited"  # KV memory: what vLLM takes
_LOW_ID = 2  # ids below are special in Llama's vocabulary and its kin


@dataclass(frozen=True)
class Workload:
    """Requests of `prompt_tokens` tokens that are each answered with exactly `output_tokens`.

    concurrency: closed loop, so many clients, each sending its next request when the last one is
    answered. rate: Poisson arrivals, so many requests a second on average, however many are
    running. Exactly one of the two is given. ramp: seconds over which the clients of a closed loop
    begin, evenly spread; 0: all at once, so that equal lengths keep them in step.

    Raises ValueError for numbers that mean nothing.
    """

    prompt_tokens: int
    output_tokens: int
    requests: int
    concurrency: int | None = None
    rate: float | None = None
    ramp: float = 0.0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError(f"expected a concurrency or a rate, got {self}")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"expected a concurrency >= 1, got {self.concurrency}")
        for name in ("prompt_tokens", "output_tokens", "requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ValueError(f"expected a rate of arrivals > 0 a second, got {self.rate}")
        if not 0 <= self.ramp < float("inf"):
            raise ValueError(f"expected a ramp >= 0 s, got {self.ramp}")

    @property
    def what(self) -> str:
        """The words of the table."""
        return POISSON if self.concurrency is None else CLOSED

    @property
    def shape(self) -> Shape:
        """Its numbers, by the names of the table; same numbers, same requests."""
        shape: Shape = {"in": self.prompt_tokens, "out": self.output_tokens}
        if self.concurrency is not None:
            shape |= {"concurrency": self.concurrency}
            shape |= {"ramp": self.ramp} if self.ramp else {}
        if self.rate is not None:
            shape |= {"rate": self.rate}
        return shape | {"requests": self.requests}

    def plain(self) -> dict[str, Any]:
        """For JSON: Workload(**plain) is the same workload."""
        return asdict(self)


def arrivals(workload: Workload, seed: int) -> list[float]:
    """Seconds from the start at which the requests of a Poisson workload arrive, ascending.

    The same seed and rate give the same times, of which fewer requests take the first.
    """
    assert workload.rate is not None
    draw = random.Random(f"arrivals {seed} {workload.rate}")
    return list(accumulate(draw.expovariate(workload.rate) for _ in range(workload.requests)))


def prompts(workload: Workload, seed: int, vocab: int, what: str = "") -> list[list[int]]:
    """Token ids of every prompt, uniform over [2, vocab): [requests][prompt_tokens].

    No two share more than a chance prefix. The same for every mode of the same seed; `what` sets
    those of the warm-up apart. Raises ValueError for a vocabulary that has nothing to draw.
    """
    if vocab <= _LOW_ID:
        raise ValueError(f"expected a vocabulary of more than {_LOW_ID} tokens, got {vocab}")
    ids = range(_LOW_ID, vocab)
    draws = (random.Random(f"{what} {seed} {i}") for i in range(workload.requests))
    return [draw.choices(ids, k=workload.prompt_tokens) for draw in draws]


class Length(NamedTuple):
    """Tokens in and out. clients: of its closed loop, which is then all that is run of it; None: as
    many as of the others."""

    prompt_tokens: int
    output_tokens: int
    clients: int | None = None


def closed(
    lengths: Sequence[Length], concurrencies: Sequence[int], rounds: int, ramp: float
) -> Iterator[Workload]:
    """A closed loop for each length and concurrency, `rounds` requests a client."""
    for prompt, new, own in lengths:
        for clients in concurrencies if own is None else [own]:
            yield Workload(prompt, new, rounds * clients, concurrency=clients, ramp=ramp)


def poisson(lengths: Sequence[Length], rates: Sequence[float], requests: int) -> Iterator[Workload]:
    """Arrivals for each rate and each length without clients of its own."""
    for prompt, new, own in lengths:
        for rate in rates if own is None else []:
            yield Workload(prompt, new, requests, rate=rate)
