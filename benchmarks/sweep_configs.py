"""Offline sweep of kernel configurations on one GPU; nothing here runs in the product.

    PYTHONPATH=. python benchmarks/sweep_configs.py OUT [prefill|columns|decode|all] [--seconds 235]

Every variant's result is compared with the peers' or the product's, then timed against them in
interleaved rounds; the fastest of a shape get more rounds. OUT/sweep.json holds every row: part,
shape, variant, ms (median of the rounds), TFLOP/s or TB/s, ratio to the reference, relative error,
or the error text of a variant that failed. Variants are compiled first, in parallel processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from sweep_gluon import prefill_gluon
from sweep_variants import columns_variant, prefill_variant
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsekv.kernels import decode
from sparsekv.kernels.column_scores import column_scores
from sparsekv.kernels.prefill import prefill_attention

HQ, HK, D = 32, 8, 128
START = time.monotonic()
ROWS: list[dict[str, Any]] = []
SAVE: list[Path] = []
Spec = tuple[str, dict[str, Any]]

# The most promising first; a later one is skipped when the time is up.
PREFILL: list[dict[str, Any]] = [
    {"HEADS_X": 32},
    {"HEADS_X": 4},
    {"BM": 128, "BN": 128, "warps": 8, "HEADS_X": 4},
    {"BM": 128, "BN": 128, "warps": 8, "HEADS_X": 32},
    {"HEADS_X": 8},
    {"HEADS_X": 4, "LATE": False},
    {"BM": 128, "BN": 128, "warps": 8, "HEADS_X": 4, "LATE": False},
    {"BM": 128, "BN": 128, "warps": 8, "HEADS_X": 4, "stages": 2, "LATE": False},
    {"HEADS_X": 4, "RESCALE": 1},
    {"BM": 128, "BN": 128, "warps": 8, "HEADS_X": 4, "RESCALE": 1},
    {"HEADS_X": 4, "AHEAD": True},
    {"HEADS_X": 4, "stages": 2},
    {"HEADS_X": 4, "stages": 4},
    {"BM": 128, "BN": 64, "warps": 8, "HEADS_X": 4},
    {"BM": 128, "BN": 64, "warps": 8, "HEADS_X": 4, "AHEAD": True},
    {"HEADS_X": 4, "PERSISTENT": 2},
    {"HEADS_X": 32, "PERSISTENT": 2},
    {"BM": 128, "BN": 128, "warps": 8, "HEADS_X": 4, "PERSISTENT": 1},
    {"HEADS_X": 32, "PACK": True},
    {"HEADS_X": 4, "PACK": True},
    {"BM": 128, "BN": 128, "warps": 8, "HEADS_X": 32, "PACK": True},
    {"BM": 128, "BN": 128, "warps": 8, "HEADS_X": 4, "PACK": True},
    {"HEADS_X": 32, "SEQ_INNER": True},
    {"HEADS_X": 4, "SEQ_INNER": True},
    {"HEADS_X": 16},
    {"HEADS_X": 1},
    {"BM": 64, "BN": 32, "HEADS_X": 4},
    {"BM": 64, "BN": 32, "stages": 4, "HEADS_X": 4},
    {"BM": 128, "BN": 32, "warps": 8, "HEADS_X": 4, "maxnreg": 128},
    {"BM": 64, "BN": 128, "HEADS_X": 4, "stages": 2},
    {"HEADS_X": 4, "maxnreg": 160},
    {"HEADS_X": 32, "USE_TMA": False},
]
# Hand-scheduled: a producer warp and two consumer warpgroups.
GLUON: list[dict[str, Any]] = [
    {"BN": bn, "ST": st, "HEADS_X": hx, "PERSISTENT": p}
    for bn, st, hx, p in (
        (128, 2, 32, 0), (128, 2, 4, 0), (128, 2, 4, 1), (128, 2, 32, 1), (64, 4, 4, 0),
        (64, 4, 32, 0), (64, 4, 4, 1), (64, 2, 4, 0), (128, 2, 8, 1),
    )
]  # fmt: skip
PREFILL_SHAPES = [(1, 4096), (1, 16384), (4, 4096), (1, 32768), (4, 16384), (4, 32768)]

_ALL_ROWS: list[dict[str, Any]] = [
    {"BN": n, "BM": m, "warps": w, "stages": s} | extra
    for n, m, w, s, extra in (
        (128, 64, 4, 3, {}),
        (128, 64, 4, 3, {"ORDER": 1}),
        (128, 64, 4, 3, {"LANES": True}),
        (128, 64, 4, 3, {"POLY": 4}),
        (128, 64, 4, 3, {"POLY": 2}),
        (128, 64, 4, 2, {}),
        (128, 64, 4, 4, {}),
        (128, 32, 4, 4, {}),
        (128, 32, 4, 3, {}),
        (64, 64, 4, 3, {}),
        (64, 64, 4, 3, {"ORDER": 1}),
        (64, 64, 4, 4, {}),
        (64, 64, 4, 3, {"POLY": 4}),
        (64, 128, 4, 3, {}),
        (64, 128, 4, 2, {}),
        (64, 32, 4, 4, {}),
        (128, 128, 8, 3, {}),
        (128, 128, 8, 2, {}),
        (128, 64, 8, 3, {}),
        (128, 128, 4, 2, {}),
        (256, 64, 8, 3, {}),
        (64, 64, 4, 3, {"USE_TMA": False}),
        (128, 64, 4, 3, {"USE_TMA": False}),
    )
]
_FEW_ROWS: list[dict[str, Any]] = [
    {"BN": n, "BM": m, "stages": s, "HEADS": h, "splits": p}
    for n, m, s in ((128, 64, 3), (64, 64, 3), (128, 32, 3), (64, 32, 3), (64, 64, 2))
    for h, p in ((4, 1), (1, 1), (2, 1), (1, 2), (4, 2), (4, 4), (1, 4))
]
COLUMN_SHAPES = [(t, r) for t in (4096, 16384, 32768) for r in (64, 256, None)]

DECODE_SHAPES = [
    (1, 4096), (1, 32768), (8, 4096), (20, 4096), (64, 4096), (1, 512), (64, 512), (16, 32768),
]  # fmt: skip
CHUNKS = (128, 256, 64, 512, 1024, 2048)
TILES = ((64, 4, 3), (32, 4, 3), (64, 4, 4), (32, 4, 4), (64, 8, 3), (128, 4, 3), (64, 2, 3))
PAGE = 64


def main() -> None:
    """Compile, measure, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("part", nargs="?", default="all")
    parser.add_argument("--seconds", type=float, default=235.0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    names = ["prefill", "columns", "decode"] if args.part == "all" else [args.part]
    specs: list[Spec] = []
    if "prefill" in names:
        specs += [("flashinfer", {"backend": b}) for b in ("fa3", "fa2")]
        specs += [("gluon", o) for o in GLUON]
        specs += [("prefill", o) for o in PREFILL]
    if "columns" in names:
        specs += [("columns", o) for o in _ALL_ROWS]
        specs += [("columns", o) for o in _FEW_ROWS if o["splits"] == 1]
    if "decode" in names:
        specs += [("decode", {"chunk": c, "tile": t}) for t in TILES for c in CHUNKS]
    bad = _compile_all(specs, limit=60.0)
    SAVE.append(args.out / "sweep.json")
    weights = {"prefill": 0.6, "columns": 0.6, "decode": 1.0}
    for name in names:
        left = args.seconds - (time.monotonic() - START)
        share = left if name == names[-1] else left * weights[name]
        try:
            {"prefill": _prefill, "columns": _columns, "decode": _decode}[name](
                bad, time.monotonic() + share
            )
        except Exception:
            traceback.print_exc()
        _save()
    print(f"done after {time.monotonic() - START:.0f} s, {len(ROWS)} rows", flush=True)


def _save() -> None:
    SAVE[0].write_text(json.dumps({"machine": _machine(), "rows": ROWS}, indent=1))


def _machine() -> dict[str, str]:
    name = torch.cuda.get_device_name()
    return {"gpu": name, "torch": torch.__version__, "triton": triton.__version__}


# --- compilation --------------------------------------------------------------------------------


def _key(spec: Spec) -> str:
    return f"{spec[0]} {json.dumps(spec[1], sort_keys=True)}"


def _compile_one(spec: Spec) -> str | None:
    """Build and run one variant on a small problem; the error text, or None."""
    try:
        kind, options = spec
        if kind == "decode":
            for capacity in (options["chunk"] * 2, options["chunk"]):
                t = _decode_problem(1, capacity, 1)
                for probs in (None, "mean") if options["tile"] == TILES[0] else (None,):
                    _decode_call(t[0], options, probs)()
        elif kind == "flashinfer":
            _flashinfer(*_qkv(1, 1024), 1, options["backend"])()
        else:
            q, k, v = _qkv(1, 1024)
            if kind == "gluon":  # also long enough to show a hang here, where it can be ended
                prefill_gluon(*_qkv(2, 4096), 2, options)()
            elif kind == "prefill":
                prefill_variant(q, k, v, 1, options)()
            else:
                columns_variant(q, k, torch.ones(HQ, 1024, device="cuda"), 1, 64, options)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[-600:]
    return None


def _compile_all(specs: list[Spec], limit: float) -> dict[str, str]:
    """Error text by key of the variants that do not compile, or not within `limit` seconds."""
    bad: dict[str, str] = {}
    began = time.monotonic()
    pool = ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn"))
    futures = {_key(spec): pool.submit(_compile_one, spec) for spec in specs}
    risky = ("flashinfer", "gluon")  # a long build, a hang
    ours = [future for key, future in futures.items() if not key.startswith(risky)]
    wait(ours, timeout=limit)
    wait(futures.values(), timeout=max(0.0, 40.0 - (time.monotonic() - began)))
    for key, future in futures.items():
        if not future.done():
            bad[key] = "not compiled in time"
        elif future.exception() is not None:  # a worker died; the variant may be innocent
            print(f"  worker: {key}: {future.exception()!r}", flush=True)
        elif future.result():
            bad[key] = future.result()
    # Stuck workers stay behind: end our own children, and only those.
    workers = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()
    print(f"compiled {len(specs) - len(bad)} in {time.monotonic() - began:.0f} s", flush=True)
    for key, error in bad.items():
        print(f"  failed: {key}: {error[-300:]}", flush=True)
        ROWS.append({"part": "compile", "variant": key, "error": error})
    return bad


# --- timing -------------------------------------------------------------------------------------


def _once(run: Callable[[], Any], least_ms: float = 4.0) -> float:
    """ms per call over enough calls to last `least_ms`, by events."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    events[0].record()
    run()
    events[1].record()
    events[1].synchronize()
    calls = max(1, min(50, round(least_ms / max(events[0].elapsed_time(events[1]), 1e-3))))
    if calls == 1:
        return events[0].elapsed_time(events[1])
    events[1].record()
    for _ in range(calls):
        run()
    events[2].record()
    events[2].synchronize()
    return events[1].elapsed_time(events[2]) / calls


def _graph(calls: list[Callable[[], Any]]) -> Callable[[], Any]:
    """One CUDA graph of all `calls`; its replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def _rounds(
    runs: dict[str, Callable[[], Any]], keep: list[str], top: int, until: float, per_call: float = 1
) -> dict[str, float]:
    """Median ms of every run: one round of all, then four of the `top` fastest and of `keep`."""
    times: dict[str, list[float]] = {}
    for name, run in runs.items():
        if time.monotonic() > until and name not in keep:
            continue
        times[name] = [_once(run) / per_call]
    fastest = sorted(times, key=lambda name: times[name][0])[:top]
    chosen = [name for name in times if name in fastest or name in keep]
    for name in chosen:
        times[name] = []
    for _ in range(4):
        for name in chosen:
            times[name].append(_once(runs[name]) / per_call)
    return {name: statistics.median(t) for name, t in times.items()}


def _error(have: torch.Tensor, want: torch.Tensor) -> float:
    return float((have.float() - want.float()).norm() / want.float().norm())


def _report(part: str, shape: str, ms: dict[str, float], errors: dict[str, float], unit: str,
            amount: float, reference: str) -> None:  # fmt: skip
    base = ms.get(reference)
    for name in sorted(ms, key=ms.__getitem__):
        row = {"part": part, "shape": shape, "variant": name, "ms": ms[name]}
        row |= {unit: amount / ms[name], "error": errors.get(name)}
        row |= {"ratio": base / ms[name] if base else None}
        ROWS.append(row)
    print(f"{part} {shape}  (ratio: speed over {reference})", flush=True)
    for name in sorted(ms, key=ms.__getitem__)[:12]:
        ratio = f"{base / ms[name]:.3f}x" if base else "-"
        error = f"{errors[name]:.1e}" if name in errors else "-"
        print(f"  {ms[name]:9.4f} ms {amount / ms[name]:7.1f} {unit} {ratio} err {error}  {name}")
    sys.stdout.flush()
    _save()


def _failed(part: str, shape: str, name: str, error: Exception) -> None:
    text = f"{type(error).__name__}: {error}"[-600:]
    ROWS.append({"part": part, "shape": shape, "variant": name, "failed": text})
    print(f"  {part} {shape} {name} FAILED {text[-200:]}", flush=True)


def _name(options: dict[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in options.items())


# --- prefill ------------------------------------------------------------------------------------


def _qkv(B: int, T: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(B * T, h, D, device="cuda", dtype=torch.bfloat16, generator=generator)
        for h in (HQ, HK, HK)
    ]


def _packed(B: int, T: int) -> dict[str, Any]:
    cu = torch.arange(0, B * T + 1, T, device="cuda", dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": T, "max_seqlen_k": T}
    return lengths | {"softmax_scale": D**-0.5}


def _sdpa(q, k, v, B: int, backend: SDPBackend) -> Callable[[], torch.Tensor]:
    q, k, v = (x.view(B, -1, x.shape[1], D).transpose(1, 2) for x in (q, k, v))

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return run


def _flashinfer(q, k, v, B: int, backend: str) -> Callable[[], torch.Tensor]:
    import flashinfer

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=backend)
    cu = _packed(B, q.shape[0] // B)["cu_seqlens_q"]
    wrapper.plan(cu, cu, HQ, HK, D, causal=True, q_data_type=q.dtype, kv_data_type=q.dtype)
    return lambda: wrapper.run(q, k, v)


def _prefill(bad: dict[str, str], until: float) -> None:
    for index, (B, T) in enumerate(PREFILL_SHAPES):
        now = time.monotonic()
        if now > until:
            break
        stop = now + (until - now) * 1.6 / (len(PREFILL_SHAPES) - index + 0.6)
        shape, (q, k, v) = f"B={B} T={T}", _qkv(B, T)
        runs: dict[str, Callable[[], Any]] = {
            "cudnn": _sdpa(q, k, v, B, SDPBackend.CUDNN_ATTENTION),
            "sdpa_fa2": _sdpa(q, k, v, B, SDPBackend.FLASH_ATTENTION),
        }
        for backend in ("fa3", "fa2"):
            if _key(("flashinfer", {"backend": backend})) not in bad:
                try:
                    runs[f"flashinfer_{backend}"] = _flashinfer(q, k, v, B, backend)
                except Exception as error:
                    _failed("prefill", shape, f"flashinfer_{backend}", error)
        packed = _packed(B, T)
        runs["product"] = lambda q=q, k=k, v=v, packed=packed: prefill_attention(q, k, v, **packed)
        peers = list(runs)
        for options in PREFILL:
            if _key(("prefill", options)) not in bad:
                runs[_name(options)] = prefill_variant(q, k, v, B, options)
        for options in GLUON:
            if _key(("gluon", options)) not in bad:
                runs["gluon " + _name(options)] = prefill_gluon(q, k, v, B, options)
        want = runs["sdpa_fa2"]().transpose(1, 2).reshape(B * T, HQ, D)
        want_lse = runs["product"]()[1]
        errors: dict[str, float] = {}
        for name in list(runs):
            try:
                got = runs[name]()
                torch.cuda.synchronize()
                if name in ("cudnn", "sdpa_fa2"):
                    got = got.transpose(1, 2).reshape(B * T, HQ, D)
                out, lse = got if isinstance(got, tuple) else (got, want_lse)
                errors[name] = max(_error(out, want), 100 * _error(lse, want_lse))
            except Exception as error:
                _failed("prefill", shape, name, error)
                del runs[name]
        flops = 2 * B * HQ * T * T * D
        ms = _rounds(runs, [p for p in peers if p in runs], 8, stop)
        _report("prefill", shape, ms, errors, "TFLOP/s", flops / 1e9, "cudnn")
        del runs, want, want_lse, q, k, v


# --- column scores ------------------------------------------------------------------------------


def _columns(bad: dict[str, str], until: float) -> None:
    for index, (T, rows) in enumerate(COLUMN_SHAPES):
        now = time.monotonic()
        if now > until:
            break
        stop = now + (until - now) * 1.5 / (len(COLUMN_SHAPES) - index + 0.5)
        shape, (q, k, v) = f"B=1 T={T} rows={rows}", _qkv(1, T)
        packed = _packed(1, T)
        lse = prefill_attention(q, k, v, **packed)[1]
        calls: dict[str, Callable[[], Any]] = {
            "product": lambda q=q, k=k, lse=lse, p=packed, rows=rows: column_scores(
                q, k, lse, **p, rows=rows
            ),
        }
        for options in _ALL_ROWS if rows is None else _FEW_ROWS:
            compiled = options | {"splits": 1} if "splits" in options else options
            if _key(("columns", compiled)) in bad:
                continue
            if options.get("splits", 1) * options["BM"] <= max(rows or T, options["BM"]):
                calls[_name(options)] = columns_variant(q, k, lse, 1, rows, options)
        want = calls["product"]()
        errors: dict[str, float] = {}
        count = 20 if rows is not None else 1
        runs: dict[str, Callable[[], Any]] = {}
        for name, call in calls.items():
            try:
                errors[name] = _error(call(), want)
                runs[name] = _graph([call] * count)
            except Exception as error:
                _failed("columns", shape, name, error)
        # The attention itself as the yardstick: the targets are fractions of it.
        once = _graph([lambda q=q, k=k, v=v, p=packed: prefill_attention(q, k, v, **p)])
        cudnn = _graph([_sdpa(q, k, v, 1, SDPBackend.CUDNN_ATTENTION)])
        ms = _rounds(runs, ["product"], 8, stop, per_call=count)
        prefill, peer = (statistics.median(_once(r) for _ in range(3)) for r in (once, cudnn))
        seen = T * T / 2 if rows is None else rows * (T - rows / 2)
        _report("columns", shape, ms, errors, "TFLOP/s", 2 * HQ * seen * D / 1e9, "product")
        best = min(ms.values())
        print(f"  best {100 * best / prefill:.1f} % of the product prefill ({prefill:.3f} ms), "
              f"{100 * best / peer:.1f} % of cuDNN ({peer:.3f} ms)", flush=True)  # fmt: skip
        attention = {"product_prefill_ms": prefill, "cudnn_ms": peer}
        ROWS.append({"part": "columns", "shape": shape, "variant": "attention"} | attention)


# --- paged decode -------------------------------------------------------------------------------


def _decode_problem(B: int, S: int, pools: int) -> list[dict[str, torch.Tensor]]:
    pages = -(-S // PAGE)
    table = torch.randperm(B * HK * pages, device="cuda", dtype=torch.int32).view(B, HK, pages)
    fixed = {
        "q": torch.randn(B, HQ, D, device="cuda", dtype=torch.bfloat16),
        "block_table": table,
        "cache_seqlens": torch.full((B, HK), S, device="cuda", dtype=torch.int32),
    }
    shape = (B * HK * pages, PAGE, D)
    return [
        fixed
        | {
            name: torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()
            for name in ("k_pages", "v_pages")
        }
        for _ in range(pools)
    ]


def _decode_call(
    t: dict[str, torch.Tensor], options: dict[str, Any], probs: str | None = None
) -> Callable[[], Any]:
    """options: chunk (None: the product's choice), tile (None: the product's)."""

    def call() -> Any:
        shipped = decode._CONFIG["sm90", D]
        decode._CONFIG["sm90", D] = options.get("tile") or shipped
        try:
            return decode.paged_decode_attention(
                **t, softmax_scale=D**-0.5, chunk_size=options.get("chunk"), probs=probs
            )
        finally:
            decode._CONFIG["sm90", D] = shipped

    return call


def _decode(bad: dict[str, str], until: float) -> None:
    for index, (B, S) in enumerate(DECODE_SHAPES):
        now = time.monotonic()
        if now > until:
            break
        stop = now + (until - now) * 1.5 / (len(DECODE_SHAPES) - index + 0.5)
        size = 4 * B * HK * S * D  # bytes of K and V
        pools = _decode_problem(B, S, max(1, min(64, -(-(160 << 20) // size))))
        count = max(20, len(pools)) if size < 1 << 29 else 4
        shape = f"B={B} S={S}"
        product = _decode_call(pools[0], {})
        want = product()[0]
        errors: dict[str, float] = {}

        def prepare(
            options: dict[str, Any], probs: str | None = None, pools=pools, count=count,
            want=want, errors=errors, shape=shape,
        ) -> dict[str, Callable[[], Any]]:  # fmt: skip
            name = (_name(options) or "product") + (f" probs={probs}" if probs else "")
            known = {"chunk": options.get("chunk"), "tile": options.get("tile")}
            if _key(("decode", known)) in bad:
                return {}
            try:
                calls = [_decode_call(t, options, probs) for t in pools]
                errors[name] = _error(calls[0]()[0], want)
                return {name: _graph([calls[i % len(calls)] for i in range(count)])}
            except Exception as error:
                _failed("decode", shape, name, error)
                return {}

        runs = prepare({}) | prepare({}, "mean")
        for chunk in CHUNKS:
            if -(-S // chunk) * B * HK < 1 << 16:
                runs |= prepare({"chunk": chunk, "tile": TILES[0]})
        first = {n: _once(r) for n, r in runs.items() if "tile" in n}
        chunks = [int(n.split()[0].split("=")[1]) for n in sorted(first, key=first.__getitem__)]
        for chunk in chunks[:2]:
            for tile in TILES[1:]:
                if time.monotonic() < stop and chunk % tile[0] == 0:
                    runs |= prepare({"chunk": chunk, "tile": tile})
        ms = _rounds(runs, ["product", "product probs=mean"], 6, stop, per_call=count)
        _report("decode", shape, ms, errors, "TB/s", size / 1e9, "product")
        del runs, pools, product


if __name__ == "__main__":
    main()
