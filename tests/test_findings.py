"""docs/findings.md quotes docs/results.md, which is generated: no interval of its own."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
INTERVAL = re.compile(r"\[[+-]\d\.\d+,\s[+-]\d\.\d+\]")


def test_every_interval_stands_in_the_results() -> None:
    quoted = INTERVAL.findall((DOCS / "findings.md").read_text(encoding="utf-8"))
    measured = set(INTERVAL.findall((DOCS / "results.md").read_text(encoding="utf-8")))
    assert len(quoted) >= 20
    assert not [text for text in quoted if " ".join(text.split()) not in measured]
