"""All cases, by group, in order of importance."""

from __future__ import annotations

from fnmatch import fnmatch

from sparsekv.bench.cache_cases import cache_cases
from sparsekv.bench.case import Case
from sparsekv.bench.context_cases import context_cases
from sparsekv.bench.decode_cases import decode_cases
from sparsekv.bench.generate_cases import generate_cases
from sparsekv.bench.memory_cases import longest_cases, memory_cases
from sparsekv.bench.policy_cases import policy_cases
from sparsekv.bench.prefill_cases import prefill_cases
from sparsekv.bench.statistic_cases import statistic_cases
from sparsekv.bench.statistic_memory_cases import statistic_memory_cases

# Groups come in pieces: the targets first, long runs that only describe last.
MAKERS = (
    ("decode", decode_cases),
    ("prefill", prefill_cases),
    ("cache", cache_cases),
    ("statistics", statistic_cases),
    ("statistics", statistic_memory_cases),
    ("generate", generate_cases),
    ("memory", memory_cases),
    ("generate", context_cases),
    ("policies", policy_cases),
    ("memory", longest_cases),
)
GROUPS = tuple(dict.fromkeys(group for group, _ in MAKERS))
# What the command line offers: the groups, and names for several of them.
SELECTIONS: dict[str, tuple[str, ...]] = {
    "all": GROUPS,
    "kernels": ("decode", "prefill", "cache", "statistics"),
    **{group: (group,) for group in GROUPS},
}


def cases(selection: str, tiny: bool, only: str | None = None) -> list[Case]:
    """The cases of a selection, in order.

    tiny: the shapes of a CPU. only: comma-separated patterns; a case whose name fits none is left
    out. Raises ValueError on an unknown selection, or when no case is left.
    """
    if selection not in SELECTIONS:
        raise ValueError(f"expected one of {', '.join(SELECTIONS)}, got {selection!r}")
    wanted = SELECTIONS[selection]
    found = [case for group, make in MAKERS if group in wanted for case in make(tiny)]
    if only is not None:
        patterns = [f"*{pattern.strip()}*" for pattern in only.split(",")]
        left = [case for case in found if any(fnmatch(case.name, p) for p in patterns)]
        if not left:
            names = "; ".join(case.name for case in found)
            raise ValueError(
                f"expected --only to name a case of {selection}, got {only!r}: {names}"
            )
        found = left
    return found
