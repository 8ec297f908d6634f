"""The comparisons: a press of kvpress, our policy of the same settings, and what sets them apart.

A case is made for a prompt of T tokens and C kept a head. `policy` is what a user would choose;
`told` is that policy with kvpress's deviation put in, by a field of ours or, where there is none
for it, by a class of deviations.py. Without told and why, nothing is expected to differ.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from deviations import (
    LastTokenTOVA,
    NoSpaceKVzip,
    ObservedAttention,
    SteppedSnapKV,
    UnscoredHeadKVzip,
    WindowInChunks,
    WindowInStageOne,
    pyramid_budgets,
)
from reasons import REASONS

from sparsekv.policies import (
    H2O,
    TOVA,
    AdaKV,
    Chunked,
    CriticalKV,
    Duo,
    Expected,
    KeyDiff,
    Knorm,
    KVzip,
    Policy,
    Pyramid,
    SnapKV,
    Streaming,
)

LAYERS, HEADS = 30, 3  # SmolLM2-135M
PREFIX = 24  # tokens of its chat template before a user's text
WINDOW, SAFE, CHUNK, BLOCK = 64, 0.2, 20, 20  # kvpress's, BLOCK apart
FEW = 12  # where the last token may lose
SHORT = 16  # a window that a safeguard of a fifth of the budget exceeds


@dataclass(frozen=True)
class Case:
    """One comparison; press is a specification for kvpress_worker.py.

    why: what differs, for the table. budget: kept a head, if not the budget of the others.
    """

    name: str
    press: dict[str, Any]
    policy: Policy
    told: Policy | None = None
    why: str = ""
    eager: bool = False
    gates: dict[str, Any] | None = None
    budget: int | None = None


def ratio(tokens: int, budget: int) -> float:
    """A compression ratio of which int(tokens * (1 - ratio)) is `budget`, whatever is rounded."""
    return 1 - (budget + 1e-3) / tokens


def cases(tokens: int, budget: int) -> list[Case]:
    """All comparisons for a prompt of `tokens` and `budget` kept."""
    keep = {"compression_ratio": ratio(tokens, budget)}
    return [
        *plain(tokens, budget, keep),
        *pyramids(tokens, keep),
        *heads(tokens, budget, keep),
        *critical(tokens, budget, keep),
        *stretches(tokens, budget, keep),
        *kvzips(tokens, budget),
        duo(),
    ]


def snapkv(keep: dict[str, float], window: int = WINDOW) -> dict[str, Any]:
    """SnapKVPress."""
    return {"class": "SnapKVPress", "window_size": window, "kernel_size": 5, **keep}


def expected(keep: dict[str, float], **fields: Any) -> dict[str, Any]:
    """ExpectedAttentionPress."""
    return {"class": "ExpectedAttentionPress", **fields, **keep}


def plain(tokens: int, budget: int, keep: dict[str, float]) -> list[Case]:
    """Scores a head."""
    return [
        Case("knorm", {"class": "KnormPress", **keep}, Knorm()),
        Case("streaming", {"class": "StreamingLLMPress", **keep}, Streaming()),
        Case("snapkv", snapkv(keep), SnapKV.kvpress()),
        Case("expected", expected(keep), Expected()),
        Case(
            "expected, no covariance",
            expected(keep, use_covariance=False, epsilon=0.01),
            Expected(covariance=False, epsilon=0.01),
        ),
        Case("tova", {"class": "TOVAPress", **keep}, TOVA(), LastTokenTOVA(), REASONS["tova"]),
        Case(
            f"tova, {FEW} kept",
            {"class": "TOVAPress", "compression_ratio": ratio(tokens, FEW)},
            TOVA(),
            LastTokenTOVA(),
            REASONS["tova"],
            budget=FEW,
        ),
        Case(
            "h2o",
            {"class": "ObservedAttentionPress", **keep},
            H2O(heavy_fraction=1.0),
            ObservedAttention(),
            REASONS["h2o"],
            eager=True,
        ),
        Case("keydiff, one cut", {"class": "KeyDiffPress", **keep}, KeyDiff(block=tokens)),
    ]


def pyramids(tokens: int, keep: dict[str, float]) -> list[Case]:
    """Budgets a layer: kvpress's defaults, and a window and slope that do give a pyramid."""
    out = []
    for window, beta in ((WINDOW, 20), (8, 8)):
        budgets = pyramid_budgets(LAYERS, tokens, keep["compression_ratio"], window, beta)
        out.append(
            Case(
                f"pyramid, window {window}, beta {beta}",
                snapkv(keep, window) | {"class": "PyramidKVPress", "beta": beta},
                Pyramid(window=window, kernel=5, pool="avg", beta=beta),
                SteppedSnapKV(window, 5, "avg", budgets=tuple(budgets)),
                REASONS["pyramid"],
            )
        )
    return out


def floor(budget: int, protected: int) -> float:
    """AdaKV's floor of the free slots that is a safeguard of `SAFE` of all slots."""
    own = int(budget * SAFE) - protected
    return 0.0 if own <= 0 else (own + 0.5) / (budget - protected)


def heads(tokens: int, budget: int, keep: dict[str, float]) -> list[Case]:
    """Budgets a head."""
    out = []
    inner = {
        "snapkv": (snapkv(keep), SnapKV.kvpress(), WINDOW),
        f"snapkv, window {SHORT}": (snapkv(keep, SHORT), SnapKV(SHORT, 5, "avg"), SHORT),
        "expected": (expected(keep, epsilon=0.01), Expected(epsilon=0.01), 4),
    }
    for name, (press, scorer, protected) in inner.items():
        out.append(
            Case(
                f"adakv({name})",
                {"class": "AdaKVPress", "press": press},
                AdaKV(scorer, mode="safeguard"),
                AdaKV(scorer, mode="safeguard", floor=floor(budget, protected)),
                REASONS["adakv"],
            )
        )
    return out


def critical(tokens: int, budget: int, keep: dict[str, float]) -> list[Case]:
    """Two stages; with nothing protected there is nothing to differ."""
    bare = expected(keep, use_vnorm=False, n_sink=0)
    ours = Expected(value_norm=False, sinks=0)
    share = max(0.0, (budget // 2 - WINDOW + 0.5) / (budget - WINDOW))
    snap, short = SnapKV.kvpress(), SnapKV(SHORT, 5, "avg")
    ada = {"class": "CriticalAdaKVPress"}
    return [
        Case(
            "criticalkv(snapkv)",
            {"class": "CriticalKVPress", "press": snapkv(keep)},
            CriticalKV(snap),
            CriticalKV(snap, first_share=share),
            REASONS["stage 1"],
        ),
        Case(
            "criticalkv(expected, no sinks)",
            {"class": "CriticalKVPress", "press": bare},
            CriticalKV(ours),
        ),
        Case(
            f"criticalkv(adakv(snapkv, window {SHORT}))",
            ada | {"press": snapkv(keep, SHORT)},
            CriticalKV(AdaKV(short, mode="safeguard")),
            WindowInStageOne(
                AdaKV(short, mode="safeguard", floor=floor(budget, SHORT)), safe_share=SAFE
            ),
            REASONS["stage 1, heads"],
        ),
        Case(
            "criticalkv(adakv(expected, no sinks))",
            ada | {"press": bare},
            CriticalKV(AdaKV(ours, mode="safeguard")),
            WindowInStageOne(AdaKV(ours, mode="safeguard"), safe_share=SAFE),
            REASONS["safeguard"],
        ),
    ]


def stretches(tokens: int, budget: int, keep: dict[str, float]) -> list[Case]:
    """Chunks and blocks; T and C are multiples of both."""
    chunks = {"class": "ChunkKVPress", "chunk_length": CHUNK}
    whole = WINDOW - WINDOW % CHUNK
    snap = SnapKV.kvpress()
    return [
        Case(
            "chunked(knorm)", chunks | {"press": {"class": "KnormPress", **keep}}, Chunked(Knorm())
        ),
        Case(
            f"chunked(snapkv, window {whole})",
            chunks | {"press": snapkv(keep, whole)},
            Chunked(SnapKV(whole, 5, "avg")),
        ),
        Case(
            "chunked(snapkv)",
            chunks | {"press": snapkv(keep)},
            Chunked(snap),
            WindowInChunks(snap, rows=WINDOW),
            REASONS["chunked"],
        ),
        Case(
            f"keydiff, blocks of {BLOCK}",
            {
                "class": "BlockPress",
                "press": {"class": "KeyDiffPress", **keep},
                "block_size": BLOCK,
            },
            KeyDiff(block=BLOCK),
            why=REASONS["keydiff"],
        ),
    ]


def kvzips(tokens: int, budget: int) -> list[Case]:
    """One budget for the whole model; prompts begin with the head of the chat template."""
    # int(numel * ratio) is what goes.
    press = {"class": "KVzipPress", "compression_ratio": (tokens - budget + 1e-3) / tokens}
    return [
        Case(
            "kvzip, template protected",
            press | {"n_sink": PREFIX},
            KVzip(chunk=2048, sinks=PREFIX),
        ),
        Case(
            "kvzip",
            press,
            KVzip(chunk=2048),
            UnscoredHeadKVzip(chunk=2048, head=PREFIX),
            REASONS["kvzip"],
        ),
        Case(
            "kvzip, three chunks",
            press | {"n_sink": PREFIX, "chunk_size": (tokens - PREFIX) // 3 + 1},
            KVzip(chunk=(tokens - PREFIX) // 3 + 1, sinks=PREFIX),
            NoSpaceKVzip(chunk=(tokens - PREFIX) // 3 + 1, sinks=PREFIX),
            REASONS["kvzip chunks"],
        ),
    ]


def duo() -> Case:
    """Gates by chance, all different; half of an even number of heads streams in both."""
    draw = random.Random(0)
    values = [draw.random() for _ in range(LAYERS * HEADS)]
    gates = tuple(tuple(values[i * HEADS : (i + 1) * HEADS]) for i in range(LAYERS))
    return Case(
        "duo",
        {"class": "DuoAttentionPress", "head_compression_ratio": 0.5},
        Duo.small_window(gates),
        gates={"sinks": 16, "recent": 64, "gates": [list(layer) for layer in gates]},
    )
