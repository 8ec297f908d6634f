"""What a user wants to be evaluated, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsekv.evaluation.lookup import find_builder
from sparsekv.evaluation.records import PROTOCOLS
from sparsekv.evaluation.settings import Feed
from sparsekv.evaluation.tasks import FULL, SMOKE, TASKS
from sparsekv.policies import POLICIES, Duo, Full, Planned

# Contexts of a task that a mode does not name.
_CONTEXTS = {"smoke": 4, "full": 100}


@dataclass(frozen=True)
class Wish:
    """What is to be evaluated, checked: dense first among the policies."""

    policies: tuple[str, ...]
    budgets: tuple[int | float, ...]
    tasks: tuple[str, ...]
    protocols: tuple[str, ...]
    mode: str
    samples: int | None
    seed: int
    data: Path | None
    gates: Path | None
    plan: Path | None
    feed: Feed

    def contexts(self, task: str) -> int:
        """How many of a task."""
        counts = SMOKE if self.mode == "smoke" else FULL
        return self.samples or counts.get(task) or _CONTEXTS[self.mode]


def check_wish(
    policies: str,
    budgets: str | None,
    tasks: str | None,
    protocol: str,
    parse_budget: Callable[[str], int | float],
    **more: Any,
) -> Wish:
    """Comma-separated names and numbers as a `Wish`; more: its other fields.

    Raises:
        ValueError: an unknown name, a bad budget, gates without duo, a plan without planned, files
            of something else, no data folder.
    """
    smoke, data, samples = more["mode"] == "smoke", more["data"], more["samples"]
    names = list(POLICIES) if policies == "all" else _known("a policy", policies, list(POLICIES))
    chosen = tuple(dict.fromkeys([Full.name, *names]))
    sizes = budgets or ("256" if smoke else "64,128,256,512")
    found = tuple(parse_budget(size.strip()) for size in sizes.split(","))
    if {type(size) for size in found if size == 1} == {int, float}:
        raise ValueError(f"expected either 1, a slot, or 1.0, everything, got --budgets {sizes}")
    wanted = tuple(SMOKE if smoke else FULL)
    if tasks is not None:
        wanted = tuple(TASKS) if tasks == "all" else _tasks(tasks)
    both = PROTOCOLS if protocol == "both" else _known("a protocol", protocol, list(PROTOCOLS))
    for option, policy in (("gates", Duo), ("plan", Planned)):
        if more[option] is not None and policy.name not in chosen:
            raise ValueError(f"expected --{option} with the policy {policy.name}, got {policies}")
        if more[option] is not None:
            policy.load(more[option])
    if data is not None and not data.is_dir():
        raise ValueError(f"expected --data to be a folder, got {str(data)!r}")
    if samples is not None and samples < 1:
        raise ValueError(f"expected --samples >= 1, got {samples}")
    if more["feed"] not in ("chunk", "steps"):
        raise ValueError(f"expected --feed chunk or steps, got {more['feed']!r}")
    return Wish(chosen, tuple(dict.fromkeys(found)), wanted, tuple(both), **more)


def _tasks(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        find_builder(name)
    return names


def _known(what: str, text: str, allowed: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in allowed:
            raise ValueError(f"expected {what} of {', '.join(allowed)}, got {name!r}")
    return names
