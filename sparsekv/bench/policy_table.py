"""The table of all policies: a line each, transformers' dense cache first."""

from __future__ import annotations

from collections.abc import Sequence

from sparsekv.bench.results import MEASURED, Row

GROUP = "policies"
_HEAD = (
    "policy", "settings", "prefill ms", "ratio to dense", "ms a token", "KV MiB", "kept",
    "peak MiB",
)  # fmt: skip
_PEER = "hf_dynamic"
_FIGURES = ("token_ms", "kv_mib", "kept", "peak_mib")


def policy_table(cases: Sequence[Sequence[Row]]) -> str:
    """Markdown of the rows of all cases. "ratio to dense" is ours by transformers' prefill time;
    a policy without figures has its status and the reason.
    """
    rows = [row for case in cases for row in case]
    peers = [row for row in rows if row.contender == _PEER and row.status == MEASURED]
    dense = peers[-1] if peers else None
    lines = [_HEAD, ("---",) * len(_HEAD)]
    if dense is not None:
        lines.append(_line("dense", "transformers' cache", dense, dense))
    for row in rows:
        if row.contender == "ours":
            lines.append(_line(str(row.shape["policy"]), _settings(row), row, dense))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _settings(row: Row) -> str:
    reason = f"{row.status}: {row.reason}" if row.status != MEASURED else ""
    return "; ".join(text for text in (row.about, reason) if text).replace("|", "\\|")


def _line(name: str, settings: str, row: Row, dense: Row | None) -> tuple[str, ...]:
    if row.value is None:
        return name, settings, row.status, *[""] * (len(_HEAD) - 3)
    ratio = f"{row.value / dense.value:.2f}" if dense is not None and dense.value else ""
    return name, settings, f"{row.value:.1f}", ratio, *(_figure(row, key) for key in _FIGURES)


def _figure(row: Row, key: str) -> str:
    value = row.extra.get(key)
    if value is None:
        return ""
    digits = {"token_ms": 2, "kv_mib": 1}.get(key, 0)
    return f"{value:.{digits}f}"
