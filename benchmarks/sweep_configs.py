"""Offline sweep of the kernels' own configuration tables on one GPU; the product never runs it.

    PYTHONPATH=. python benchmarks/sweep_configs.py OUT [prefill,columns,decode|all] [--seconds 200]

A variant is a table entry put in place of the shipped one. Its result is compared with the shipped
kernel's (prefill: with SDPA's), then it is timed against it in interleaved rounds; the fastest of a
shape get more rounds. Variants are built first, in processes of their own that are ended when one
hangs. OUT/sweep.json holds every row: part, shape, variant, ms (median), TFLOP/s or TB/s, ratio to
the reference, relative error, or the error text. At the end the fastest entry of every shape is
printed: the table to ship.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsekv.kernels import _column_scores_tma, _decode_plan, _prefill_gluon, prefill
from sparsekv.kernels.column_scores import column_scores
from sparsekv.kernels.decode import paged_decode_attention
from sparsekv.kernels.prefill import prefill_attention

HQ, HK, D, PAGE = 32, 8, 128, 64
Run = Callable[[], Any]

PREFILL_SHAPES = [(1, 4096), (1, 16384), (4, 4096), (1, 32768), (4, 16384), (4, 32768)]
ORDERS = [(p, h) for p in (True, False) for h in (0, 1, 2)]
GLUON = [{"tiles": (128, 2), "order": o} for o in ORDERS] + [{"tiles": (64, 4), "order": ORDERS[0]}]
PLAIN = [{"plain": (64, 64, 4, 3)}, {"plain": (128, 128, 8, 3)}]
COLUMN_SHAPES = [(t, r) for t in (4096, 16384, 32768) for r in (64, 256, None)]
FEW_ROWS = [
    (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3), (128, 64, 4, 3),
    (128, 128, 8, 2), (64, 32, 4, 3), (64, 256, 8, 2), (128, 128, 4, 2),
]  # fmt: skip
ALL_ROWS = [(64, 128, 4, 3), (64, 128, 4, 2), (128, 128, 4, 2), (64, 64, 4, 3), (64, 256, 8, 2)]
DECODE_SHAPES = [
    (1, 512), (1, 4096), (1, 32768), (8, 4096), (20, 4096), (64, 512), (64, 4096), (16, 32768),
]  # fmt: skip
CHUNKS = (64, 128, 256, 512, 1024, 2048)
TILES = ((64, 4, 3), (32, 4, 3), (64, 4, 4), (32, 4, 4), (64, 8, 3), (128, 4, 3))


class Sweep:
    """The rows of a run, the time it may take, the variants that could not be built."""

    def __init__(self, file: Path, seconds: float) -> None:
        self.file, self.end = file, time.monotonic() + seconds
        self.rows: list[dict[str, Any]] = []
        self.bad: set[str] = set()

    def add(self, part: str, shape: str, **row: Any) -> None:
        """Keep a row, and write all of them: a run that is cut short leaves its results."""
        self.rows.append({"part": part, "shape": shape} | row)
        names = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        machine = names | {"triton": triton.__version__}
        self.file.write_text(json.dumps({"machine": machine, "rows": self.rows}, indent=1))

    def shapes(self, shapes: list, share: float) -> Iterator[tuple[Any, float]]:
        """(shape, when its first round must be over), while `share` of the time left lasts."""
        end = time.monotonic() + (self.end - time.monotonic()) * share
        for index, shape in enumerate(shapes):
            now = time.monotonic()
            if now > end:
                print(f"  out of time before {shapes[index:]}", flush=True)
                return
            yield shape, now + (end - now) * 1.5 / (len(shapes) - index + 0.5)


# --- variants: an entry in place of the shipped table -------------------------------------------


@contextmanager
def shipped_instead_of(owner: Any, name: str, value: Any) -> Iterator[None]:
    """owner.name (or owner[name]) is `value` inside."""
    table = isinstance(owner, dict)
    old = owner[name] if table else getattr(owner, name)
    put = owner.__setitem__ if table else lambda key, new: setattr(owner, key, new)
    put(name, value)
    try:
        yield
    finally:
        put(name, old)


def prefill_run(problem: dict[str, Any], options: dict[str, Any]) -> Run:
    """options: {} the product; tiles and order of the Gluon kernel; or plain: its tiles."""

    def run() -> Any:
        if "plain" in options:
            entry = ((0, prefill._Tiles(*options["plain"])),)
            with (
                shipped_instead_of(prefill._CONFIG, ("sm90", D), entry),
                shipped_instead_of(_prefill_gluon, "matrices", lambda *_: None),
            ):
                return prefill_attention(**problem)
        orders = [(0, 1, _prefill_gluon.Order(*options["order"]))]
        with (
            shipped_instead_of(_prefill_gluon, "ORDERS", orders),
            shipped_instead_of(_prefill_gluon.TILES, D, _prefill_gluon.Tiles(*options["tiles"])),
        ):
            return prefill_attention(**problem)

    return run if options else lambda: prefill_attention(**problem)


def columns_run(problem: dict[str, Any], rows: int | None, options: dict[str, Any]) -> Run:
    """options: {} the product; tiles and heads_first; or pointer: without descriptors."""

    def run() -> Any:
        if "pointer" in options:
            with shipped_instead_of(_column_scores_tma, "matrices", lambda *_: None):
                return column_scores(**problem, rows=rows)
        tiles = _column_scores_tma.Tiles(*options["tiles"], options["heads_first"])
        with shipped_instead_of(_column_scores_tma.CONFIG, ("sm90", D), [(0, tiles)]):
            return column_scores(**problem, rows=rows)

    return run if options else lambda: column_scores(**problem, rows=rows)


def columns_options(rows: int | None) -> list[dict[str, Any]]:
    """The variants for so many rows."""
    orders = (True,) if rows is not None else (True, False)
    tiles = ALL_ROWS if rows is None else FEW_ROWS
    found = [{"tiles": t, "heads_first": h} for t in tiles for h in orders]
    return [*found, {"pointer": True}]


def decode_run(problem: dict[str, Any], options: dict[str, Any]) -> Run:
    """options: {} the product; chunk and tile."""

    def run() -> Any:
        scale = D**-0.5
        if not options:
            return paged_decode_attention(**problem, softmax_scale=scale)
        with shipped_instead_of(_decode_plan.CONFIG, ("sm90", D), options["tile"]):
            chunk = options["chunk"]
            return paged_decode_attention(**problem, softmax_scale=scale, chunk_size=chunk)

    return run


def name_of(options: dict[str, Any]) -> str:
    """Unique, short: the row's "variant"."""
    return " ".join(f"{k}={v}" for k, v in options.items()) or "product"


# --- problems -----------------------------------------------------------------------------------


def packed(batch: int, tokens: int, with_lse: bool = False) -> dict[str, Any]:
    """A causal problem of `batch` sequences; with_lse: of column_scores instead of prefill."""
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = {"q": HQ, "k": HK, "v": HK}
    t: dict[str, Any] = {
        name: torch.randn(batch * tokens, h, D, device="cuda", generator=generator).bfloat16()
        for name, h in sizes.items()
    }
    cu = torch.arange(0, batch * tokens + 1, tokens, device="cuda", dtype=torch.int32)
    t |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": tokens, "max_seqlen_k": tokens}
    t |= {"softmax_scale": D**-0.5, "seqused_q": cu.diff(), "seqused_k": cu.diff()}
    if with_lse:
        t["lse"] = prefill_attention(**t)[1]
        del t["v"]
    return t


def paged(batch: int, slots: int, pools: int) -> list[dict[str, Any]]:
    """`pools` problems of paged decode, so that a round of calls does not fit the L2."""
    pages = -(-slots // PAGE)
    count = batch * HK * pages
    fixed = {
        "q": torch.randn(batch, HQ, D, device="cuda", dtype=torch.bfloat16),
        "block_table": torch.randperm(count, device="cuda").int().view(batch, HK, pages),
        "cache_seqlens": torch.full((batch, HK), slots, device="cuda", dtype=torch.int32),
    }

    def pool() -> torch.Tensor:
        return torch.empty(count, PAGE, D, device="cuda", dtype=torch.bfloat16).normal_()

    return [fixed | {"k_pages": pool(), "v_pages": pool()} for _ in range(pools)]


def sdpa(t: dict[str, Any], batch: int, backend: SDPBackend) -> Run:
    """PyTorch's attention on the same tensors -> out [Tq, HQ, D]."""
    q, k, v = (t[n].view(batch, -1, t[n].shape[1], D).transpose(1, 2) for n in "qkv")

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return run


# --- building -----------------------------------------------------------------------------------


def build_one(part: str, options: dict[str, Any]) -> str | None:
    """Run a variant on small problems in this process; the error text, or None."""
    try:
        if part == "decode":
            for slots in (options["chunk"], 2 * options["chunk"]):
                decode_run(paged(1, slots, 1)[0], options)()
        elif part == "columns":
            columns_run(packed(1, 1024, with_lse=True), options.get("rows"), options)()
        else:
            prefill_run(packed(2, 4096), options)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[-600:]
    return None


def build(sweep: Sweep, jobs: list[tuple[str, dict[str, Any]]], limit: float) -> None:
    """Build every job in parallel; what fails or takes longer than `limit` seconds is left out."""
    began = time.monotonic()
    pool = ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn"))
    futures = {f"{p} {name_of(o)}": pool.submit(build_one, p, o) for p, o in jobs}
    wait(futures.values(), timeout=limit)
    for name, future in futures.items():
        error = "not built in time"
        if future.done():
            error = repr(future.exception()) if future.exception() else future.result()
        if error:
            sweep.bad.add(name)
            sweep.add("build", "", variant=name, failed=error)
            print(f"  failed: {name}: {error[-300:]}", flush=True)
    workers = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:  # our own children: a stuck one would hold the GPU
        worker.kill()
    print(f"built {len(jobs) - len(sweep.bad)} in {time.monotonic() - began:.0f} s", flush=True)


# --- timing -------------------------------------------------------------------------------------


def once(run: Run, least_ms: float = 4.0) -> float:
    """ms per call over enough calls to last `least_ms`."""
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    run()
    middle.record()
    middle.synchronize()
    calls = max(1, min(50, round(least_ms / max(start.elapsed_time(middle), 1e-3))))
    middle.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return middle.elapsed_time(end) / calls


def graph(calls: list[Run]) -> Run:
    """One CUDA graph of all calls; its replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for call in calls:
            call()
    return captured.replay


def measure(
    sweep: Sweep, part: str, shape: str, runs: dict[str, Run], until: float, amount: float,
    unit: str, reference: str, errors: dict[str, float], calls: int = 1,
) -> None:  # fmt: skip
    """One round of all runs, then four of the fastest eight and the reference; keep and print."""
    times: dict[str, list[float]] = {}
    for name, run in runs.items():
        if time.monotonic() < until or name == reference:
            times[name] = [once(run) / calls]
    chosen = sorted(times, key=lambda name: times[name][0])[:8]
    chosen += [name for name in (reference, "product") if name in times and name not in chosen]
    for name in chosen:
        times[name] = []
    for _ in range(4):
        for name in chosen:
            times[name].append(once(runs[name]) / calls)
    ms = {name: statistics.median(values) for name, values in times.items()}
    print(f"{part} {shape} (ratio: speed over {reference})", flush=True)
    for name in sorted(ms, key=ms.__getitem__):
        row = {"ms": ms[name], unit: amount / ms[name], "ratio": ms[reference] / ms[name]}
        sweep.add(part, shape, variant=name, error=errors.get(name), **row)
        print(
            f"  {ms[name]:9.4f} ms {row[unit]:7.1f} {unit} {row['ratio']:.3f}x "
            f"err {errors.get(name, 0):.1e}  {name}",
            flush=True,
        )


def checked(
    sweep: Sweep, part: str, shape: str, runs: dict[str, Run], want: torch.Tensor
) -> dict[str, float]:
    """Relative error of every run against `want`; those that fail are removed."""
    errors = {}
    for name, run in list(runs.items()):
        try:
            got = run()
            got = got[0] if isinstance(got, tuple) else got
            errors[name] = float((got.float() - want.float()).norm() / want.float().norm())
        except Exception as error:
            sweep.add(part, shape, variant=name, failed=f"{type(error).__name__}: {error}"[-600:])
            print(f"  {part} {shape} {name} FAILED {str(error)[-200:]}", flush=True)
            del runs[name]
    return errors


# --- parts --------------------------------------------------------------------------------------


def sweep_prefill(sweep: Sweep, share: float) -> None:
    """Against cuDNN, with the product's own choice among the variants."""
    for (batch, tokens), until in sweep.shapes(PREFILL_SHAPES, share):
        t, shape = packed(batch, tokens), f"B={batch} T={tokens}"
        runs = {"cudnn": sdpa(t, batch, SDPBackend.CUDNN_ATTENTION), "product": prefill_run(t, {})}
        for options in (*GLUON, *PLAIN):
            if f"prefill {name_of(options)}" not in sweep.bad:
                runs[name_of(options)] = prefill_run(t, options)
        want = sdpa(t, batch, SDPBackend.FLASH_ATTENTION)()
        errors = checked(sweep, "prefill", shape, runs, want)
        count = max(1, 16384 // (batch * tokens))  # the host must not be what is timed
        runs = {name: graph([run] * count) for name, run in runs.items()}
        amount = 2 * batch * HQ * tokens * tokens * D / 1e9
        measure(sweep, "prefill", shape, runs, until, amount, "TFLOP/s", "cudnn", errors, count)


def sweep_columns(sweep: Sweep, share: float) -> None:
    """Under a CUDA graph, also as a fraction of the prefill attention itself."""
    for (tokens, rows), until in sweep.shapes(COLUMN_SHAPES, share):
        shape, t = f"B=1 T={tokens} rows={rows}", packed(1, tokens, with_lse=True)
        runs = {"product": columns_run(t, rows, {})}
        for options in columns_options(rows):
            if f"columns {name_of(options)}" not in sweep.bad:
                runs[name_of(options)] = columns_run(t, rows, options)
        errors = checked(sweep, "columns", shape, runs, runs["product"]())
        count = 20 if rows is not None else 1
        runs = {name: graph([run] * count) for name, run in runs.items()}
        seen = tokens**2 / 2 if rows is None else rows * (tokens - rows / 2)
        amount = 2 * HQ * seen * D / 1e9
        measure(sweep, "columns", shape, runs, until, amount, "TFLOP/s", "product", errors, count)
        attention = graph([prefill_run(packed(1, tokens), {})])
        ms = statistics.median(once(attention) for _ in range(3))
        mine = [r for r in sweep.rows if (r["part"], r["shape"]) == ("columns", shape)]
        best = min(row["ms"] for row in mine if "ms" in row)
        sweep.add("columns", shape, variant="prefill attention", attention_ms=ms)
        print(f"  best: {100 * best / ms:.1f} % of the prefill attention ({ms:.3f} ms)", flush=True)


def sweep_decode(sweep: Sweep, share: float) -> None:
    """Under a CUDA graph over several pools; tiles only for the two best chunks."""
    for (batch, slots), until in sweep.shapes(DECODE_SHAPES, share):
        size = 4 * batch * HK * slots * D  # bytes of K and V
        pools = paged(batch, slots, max(1, min(64, -(-(160 << 20) // size))))
        count = max(20, len(pools)) if size < 1 << 29 else 4
        shape = f"B={batch} S={slots}"

        def prepared(options: dict[str, Any], pools=pools, count=count) -> Run:
            calls = [decode_run(t, options) for t in pools]
            return graph([calls[i % len(calls)] for i in range(count)])

        fits = [c for c in CHUNKS if -(-slots // c) * batch * HK < 1 << 16]
        variants = [{"chunk": c, "tile": TILES[0]} for c in fits]
        first = {c["chunk"]: once(prepared(c)) for c in variants}
        best = sorted(first, key=first.__getitem__)[:2]
        variants += [{"chunk": c, "tile": t} for c in best for t in TILES[1:] if c % t[0] == 0]
        variants = [v for v in variants if f"decode {name_of(v)}" not in sweep.bad]
        plain = {name_of(v): decode_run(pools[0], v) for v in ({}, *variants)}
        errors = checked(sweep, "decode", shape, plain, plain["product"]()[0])
        runs = {name_of(v): prepared(v) for v in ({}, *variants) if name_of(v) in plain}
        measure(sweep, "decode", shape, runs, until, size / 1e9, "TB/s", "product", errors, count)


def print_table(sweep: Sweep) -> None:
    """The fastest variant of every shape."""
    print("fastest by shape (speed over the product's own choice):")
    keys = dict.fromkeys((r["part"], r["shape"]) for r in sweep.rows if "ms" in r)
    for key in keys:
        rows = [r for r in sweep.rows if (r["part"], r["shape"]) == key and "ms" in r]
        ms = {row["variant"]: row["ms"] for row in rows}
        ours = [name for name in ms if name not in ("cudnn", "product")]
        best = min(ours, key=ms.__getitem__)
        print(f"  {key[0]:8} {key[1]:22} {best}  {ms.get('product', ms[best]) / ms[best]:.3f}x")


def main() -> None:
    """Build, measure, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", nargs="?", default="all")
    parser.add_argument("--seconds", type=float, default=200.0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(args.out / "sweep.json", args.seconds)
    parts = ["prefill", "columns", "decode"] if args.parts == "all" else args.parts.split(",")
    jobs = [("prefill", o) for o in (*GLUON, *PLAIN) if "prefill" in parts]
    if "columns" in parts:
        found = {name_of(o): o for rows in (64, None) for o in columns_options(rows)}
        jobs += [("columns", o) for o in found.values()]
    if "decode" in parts:
        jobs += [("decode", {"chunk": c, "tile": t}) for t in TILES for c in CHUNKS if c >= t[0]]
    build(sweep, jobs, limit=min(60.0, args.seconds / 3))
    kinds = {"prefill": sweep_prefill, "columns": sweep_columns, "decode": sweep_decode}
    for index, part in enumerate(parts):
        try:
            kinds[part](sweep, 1 / (len(parts) - index))
        except Exception:
            traceback.print_exc()
    print_table(sweep)


if __name__ == "__main__":
    main()
