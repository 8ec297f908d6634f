"""Kept sets of kvpress and of sparsekv on SmolLM2-135M, side by side.

    python scripts/side_by_side/compare.py --kvpress-python PYTHON [--out FOLDER] [--only NAME]

PYTHON is an interpreter that has kvpress 0.5.5 (or a script that starts one). Prompts are the head
of the model's chat template and Python's own help texts, without padding. What is compared are
triples of layer, KV head and position that stay after a prompt; the share is that of the triples
of both among the larger of the two sets, so that 1 means equal sets. FOLDER gets kept.csv.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from cases import PREFIX, Case, cases

import sparsekv
from sparsekv.models import default_model, load
from sparsekv.policies import Policy
from sparsekv.show_kept import kept_of

HERE = Path(__file__).resolve().parent
# Help text, tokens of the prompt, kept a head.
CELLS = (("execmodel", 320, 100), ("execmodel", 320, 160), ("import", 500, 120),
         ("import", 500, 240))  # fmt: skip
WORKER_SECONDS = 3600


@dataclass(frozen=True)
class Row:
    """One case on one prompt. Shares as above; heads: of all KV heads, those with equal sets.

    lowest: share in the first layer alone. gap: where told (or, without it, ours) differs in a
    layer, how far kvpress's scores of what only one of the two keeps lie apart, at most, as a
    share of the larger; empty where nothing differs or nothing is known. sha256: of kvpress's set.
    """

    case: str
    text: str
    tokens: int
    budget: int
    kept: int
    share: float
    heads: int
    lowest: float
    told_share: float | None
    told_heads: int | None
    gap: float | None
    sha256: str


def prompts(tokenizer: Any) -> dict[str, list[int]]:
    """Token ids by name of the text and length."""
    head = tokenizer.apply_chat_template(
        [{"role": "user", "content": "@"}], tokenize=False, add_generation_prompt=True
    ).split("@")[0]
    first = tokenizer(head, add_special_tokens=False).input_ids
    if len(first) != PREFIX:
        raise ValueError(f"expected a chat template of {PREFIX} tokens, got {len(first)}")
    out = {}
    for text, tokens, _ in CELLS:
        ids = first + tokenizer(topics[text], add_special_tokens=False).input_ids
        out[f"{text} {tokens}"] = ids[:tokens]
    return out


def key(case: Case, text: str, tokens: int, budget: int) -> str:
    """The name of a case's result."""
    return f"{case.name} | {text} {tokens} {budget}"


def selected(only: str | None) -> Iterator[tuple[Case, str, int, int]]:
    """Cases with text, tokens and budget; those with a budget of their own once a prompt."""
    seen = set()
    for text, tokens, budget in CELLS:
        for case in cases(tokens, budget):
            cell = case.name, text, tokens, case.budget or budget
            if cell not in seen and (only is None or only in case.name):
                seen.add(cell)
                yield case, *cell[1:]


def theirs(python: str, ids: dict[str, list[int]], only: str | None) -> dict[str, np.ndarray]:
    """What the worker wrote."""
    work = [
        {"id": key(case, *cell), "prompt": f"{cell[0]} {cell[1]}", "press": case.press,
         "eager": case.eager, "gates": case.gates}
        for case, *cell in selected(only)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        ask, answer = Path(folder, "cases.json"), Path(folder, "kept.npz")
        model = str(default_model())
        ask.write_text(json.dumps({"model": model, "prompts": ids, "cases": work}))
        command = [python, str(HERE / "kvpress_worker.py"), str(ask), str(answer)]
        subprocess.run(command, check=True, timeout=WORKER_SECONDS)
        with np.load(answer) as data:
            return dict(data)


def ours(model: Any, tokenizer: Any, ids: list[int], policy: Policy, budget: int) -> np.ndarray:
    """bool [L, HK, T]."""
    with torch.no_grad():
        kept = kept_of(model, tokenizer, torch.tensor([ids]), policy, budget)
    sparsekv.unpatch(model)
    return kept


def share(a: np.ndarray, b: np.ndarray) -> float:
    """Of the triples in the larger set, those in both."""
    return float((a & b).sum() / max(a.sum(), b.sum()))


def equal_heads(a: np.ndarray, b: np.ndarray) -> int:
    """KV heads that keep the same tokens."""
    return int((a == b).all(-1).sum())


def gap(a: np.ndarray, b: np.ndarray, scores: np.ndarray | None) -> float | None:
    """How far the scores of what only one of a, b [L, HK, T] keeps lie apart in a layer."""
    if scores is None or scores.shape != a.shape or (a == b).all():
        return None  # BlockPress scores its last block only
    widest = 0.0
    for mine, other, s in zip(a, b, scores, strict=True):
        differ = s[mine != other]
        if differ.size:
            widest = max(widest, float((differ.max() - differ.min()) / np.abs(differ).max()))
    return widest


def compare(python: str, only: str | None = None) -> list[Row]:
    """All rows, kvpress first, in a process of its own."""
    model, tokenizer = load(None, device="cpu", dtype=torch.float32)
    ids = prompts(tokenizer)
    wanted = theirs(python, ids, only)
    rows = []
    for case, text, tokens, budget in selected(only):
        name = key(case, text, tokens, budget)
        want, prompt = wanted[f"kept/{name}"], ids[f"{text} {tokens}"]
        have = ours(model, tokenizer, prompt, case.policy, budget)
        row = Row(
            case.name, text, tokens, budget, int(want.sum()), share(want, have),
            equal_heads(want, have), share(want[:1], have[:1]), None, None,
            None, hashlib.sha256(np.packbits(want).tobytes()).hexdigest(),
        )  # fmt: skip
        if case.told is not None:
            have = ours(model, tokenizer, prompt, case.told, budget)
            told = share(want, have), equal_heads(want, have)
            row = replace(row, told_share=told[0], told_heads=told[1])
        row = replace(row, gap=gap(want, have, wanted.get(f"scores/{name}")))
        print(line(row), flush=True)
        rows.append(row)
    return rows


def line(row: Row) -> str:
    """A row for the terminal."""
    told = "" if row.told_share is None else f"  told {row.told_share:.5f} {row.told_heads:3d}"
    apart = "" if row.gap is None else f"  gap {row.gap:.1e}"
    return (
        f"{row.case:46s} {row.tokens:4d} {row.budget:4d}  {row.share:.5f} {row.heads:3d}"
        f"  layer 0 {row.lowest:.3f}{told}{apart}"
    )


def write(rows: Iterable[Row], path: Path) -> None:
    """CSV with a header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, [*Row.__dataclass_fields__], lineterminator="\n")
        out.writeheader()
        for row in rows:
            out.writerow({k: round(v, 6) if isinstance(v, float) else v
                          for k, v in asdict(row).items()})  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kvpress-python", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="part of a case's name")
    arguments = parser.parse_args()
    rows = compare(arguments.kvpress_python, arguments.only)
    if arguments.out is not None:
        write(rows, arguments.out / "kept.csv")


if __name__ == "__main__":
    sys.exit(main())
