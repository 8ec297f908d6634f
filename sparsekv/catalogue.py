"""docs/policies.md: what each policy is, taken from its class, its docstring and its `facts`.

What is said of a policy is its module's docstring but for the title; what that indents is the
formula. Statistics, settings, presets and the tensor-parallel need are asked of the class, so they
cannot be out of date.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

from sparsekv.policies import POLICIES, ModelShape, Policy
from sparsekv.policies._facts import Facts

_HEADER = """# Policies

Written by `sparsekv policies --markdown` from the classes in `sparsekv/policies/`; change those.

Letters: C is the budget (slots per KV head), T the tokens of a prompt, n the keys a head holds, t
the newest token; HQ query heads share HK KV heads, G = HQ / HK to one, of D numbers each; L layers;
A_hij is the softmax of query head h, query i, key j. Costs are per layer and row, on top of dense
attention: 2 T^2 D HQ FLOPs for a prompt, 4 n D HQ a step. The pictures show what stays of a prompt
of Python's own help texts in SmolLM2-135M (30 layers, 3 KV heads) at a budget of 512 (pyramidinfer:
0.6, its tail alone is a fifth of a prompt; duo: with gates that `sparsekv gates` measured on the
same text; planned: with a plan that `sparsekv plan` made of other help texts): a row is a layer;
the darker a place, the more of its KV heads keep the token. `sparsekv show-kept` draws them.
"""
_SUMMARY = ("policy", "keeps", "acts", "protects", "tensor parallel")
# Enough layers for policies whose first ones differ.
_LAYERS = range(64)


def markdown() -> str:
    """The whole document.

    Raises:
        ValueError: a policy without formula or facts.
    """
    lines = [_HEADER, *_table(_SUMMARY, (_summary(cls) for cls in POLICIES.values()))]
    for cls in POLICIES.values():
        lines += ["", *section(cls)]
    return "\n".join(lines) + "\n"


def section(cls: type[Policy]) -> list[str]:
    """The lines on one policy."""
    facts = facts_of(cls)
    about = {
        "protects": facts.protects,
        "budget": facts.budget,
        "acts": facts.acts,
        "statistics": "; ".join(statistics(cls())) or "none",
        "FLOPs": facts.flops,
        "bytes": facts.bytes,
        "tensor parallel": _tensor_parallel(cls),
        "paper": _linked(cls.paper),
    }
    lines = [f"## {cls.name}", "", f"Keeps {cls.keeps}.", "", *explanation(cls)]
    lines += [*_table(("", ""), about.items()), ""]
    settings = list(_settings(cls))
    lines += _table(("setting", "default", "values"), settings) if settings else ["No settings."]
    presets = list(_presets(cls))
    lines += ["", "Presets:", "", *presets] if presets else []
    return [*lines, "", f"![kept positions of {cls.name}](kept/{cls.name}.png)"]


def facts_of(cls: type[Policy]) -> Facts:
    """The facts in the class itself: those of a class that it extends are not its own."""
    facts = vars(cls).get("facts")
    if not isinstance(facts, Facts):
        raise ValueError(f"expected `facts: ClassVar[Facts]` in {cls.__name__}, got {facts!r}")
    return facts


def explanation(cls: type[Policy]) -> list[str]:
    """The module's docstring after its title: the letters of a formula are told around it."""
    text = inspect.cleandoc(inspect.getmodule(cls).__doc__ or "")
    lines: list[str] = []
    for paragraph in text.split("\n\n")[1:]:
        if paragraph.startswith("    "):
            lines += ["```text", *(line[4:] for line in paragraph.splitlines()), "```", ""]
        else:
            lines += [*paragraph.splitlines(), ""]
    if "```text" not in lines:
        raise ValueError(f"expected an indented formula in the docstring of {cls.__module__}")
    return lines


def statistics(policy: Policy) -> Iterator[str]:
    """What the runtime computes for a policy, by phase."""
    for phase, when in (("prefill", "prompt"), ("decode", "step")):
        found: dict[str, None] = {}  # a set that keeps its order
        for layer in _LAYERS:
            need = policy.needs(layer, phase)  # type: ignore[arg-type]
            if need is not None:
                found[_need(policy, need, phase)] = None
            for feature in _features(policy, layer, phase):
                found[f"`{feature!r}`"] = None
        if found:
            yield f"{when}: {', '.join(found)}"


def _features(policy: Policy, layer: int, phase: str) -> tuple:
    ask = getattr(policy, "features", None)
    return () if ask is None else ask(layer, phase)


def _need(policy: Policy, need: Any, phase: str) -> str:
    """In words: "sum of A over the last 32 rows, mean of a group's heads"."""
    what = {"sum": "sum of A", "max": "maximum of A", "count": "count of low A"}[need.statistic]
    rows = "all rows" if need.rows is None else f"the last {need.rows} rows"
    if need.rows == 1:
        rows = "the last row"
    over = f"{what} over {rows}"
    if phase == "decode" and (need.rows is None or not _acts_at_intervals(policy)):
        over = "A of its row"
    noisy = " under noise" if getattr(need, "noise", None) is not None else ""
    heads = "all heads" if need.group == "layer_mean" else "a group's heads"
    return f"{over}{noisy}, {need.group.removeprefix('layer_')} of {heads}"


def _acts_at_intervals(policy: Policy) -> bool:
    """Whether a statistic of decode steps is made of several of them."""
    shape = ModelShape(len(_LAYERS), num_heads=32, num_kv_heads=8, head_dim=128)
    return any(str(layer.decode) == "interval" for layer in policy.plan(shape, 1 << 16, 1 << 10))


def _summary(cls: type[Policy]) -> tuple[str, ...]:
    facts = facts_of(cls)
    link = f"[{cls.name}](#{cls.name})"
    return link, cls.keeps, facts.acts, facts.protects, _tensor_parallel(cls).split(":")[0]


def _tensor_parallel(cls: type[Policy]) -> str:
    if getattr(cls(), "tensor_parallel", "local") == "local":
        return "local: each rank decides for its own heads"
    return "refused: ranks would have to agree"


def _linked(paper: str) -> str:
    return re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", paper)


def _settings(cls: type[Policy]) -> Iterator[tuple[str, ...]]:
    defaults = cls()
    for f in dataclasses.fields(cls):
        kind = str(f.type)
        options = re.fullmatch(r"Literal\[(.*)\]", kind)
        values = options.group(1) if options else kind
        yield f"`{f.name}`", f"`{getattr(defaults, f.name)!r}`", f"`{values}`"


def _presets(cls: type[Policy]) -> Iterator[str]:
    """Class methods of the class itself that need no argument, or settings only."""
    settings = {f.name for f in dataclasses.fields(cls)}
    for name, member in vars(cls).items():
        if isinstance(member, classmethod) and not name.startswith("_"):
            build = getattr(cls, name)
            parameters = inspect.signature(build).parameters.values()
            if all(p.name in settings or p.default is not p.empty for p in parameters):
                shown = (
                    p.name if p.default is p.empty else f"{p.name}={p.default!r}"
                    for p in parameters
                )  # fmt: skip
                about = (inspect.getdoc(build) or "").splitlines()[0]
                yield f"- `{cls.__name__}.{name}({', '.join(shown)})`: {about}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """A markdown table; "|" in a cell is escaped."""
    head = tuple(head)
    lines = [head, ("---",) * len(head), *rows]
    return ["| " + " | ".join(str(c).replace("|", "\\|") for c in row) + " |" for row in lines]
