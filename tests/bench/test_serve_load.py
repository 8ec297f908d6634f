"""The load of the serving benchmark in virtual time: what is sent when, and what comes of it."""

from __future__ import annotations

import asyncio
import math

import pytest
from virtual_clock import FakeEngine, run

from sparsekv.bench.serve.figures import figures
from sparsekv.bench.serve.load import Trace, drive
from sparsekv.bench.serve.session import Session
from sparsekv.bench.serve.steps import StepLog
from sparsekv.bench.serve.workload import Length, Workload, arrivals, closed, poisson, prompts

APPROX = pytest.approx


def loop(requests: int, concurrency: int, new: int = 10, **kwargs: float) -> Workload:
    return Workload(8, new, requests, concurrency=concurrency, **kwargs)


def sent(engine: FakeEngine, workload: Workload, seed: int = 0) -> list[Trace]:
    return run(drive(engine, workload, prompts(workload, seed, 100), seed))


# ---------------------------------------------------------------------- closed loop


@pytest.mark.parametrize(("requests", "concurrency"), [(6, 1), (6, 2), (12, 4), (7, 3), (2, 5)])
def test_throughput_is_exact(requests: int, concurrency: int) -> None:
    """Equal requests run in rounds: each takes 10 steps of 10 ms."""
    engine, workload = FakeEngine(), loop(requests, concurrency)
    found = figures(workload, sent(engine, workload))
    seconds = math.ceil(requests / concurrency) * 10 * 0.01
    assert found["seconds"] == APPROX(seconds)
    assert found["out_tok_s"] == APPROX(requests * 10 / seconds)
    assert found["total_tok_s"] == APPROX(requests * 18 / seconds)
    assert found["failures"] == 0
    for name in ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms"):
        assert found[name] == APPROX(10), name
    assert found["itl_p99_ms"] == APPROX(10)
    assert engine.at_once == min(requests, concurrency)


@pytest.mark.parametrize("ramp", [0.0, 0.07, 1.0])
def test_concurrency_is_never_exceeded(ramp: float) -> None:
    """Counted from the traces: between a request's sending and its last token it is in flight."""
    engine, workload = FakeEngine(step_s=0.003), loop(23, 4, ramp=ramp)
    traces = sent(engine, workload)
    for trace in traces:
        inside = [t for t in traces if t.sent <= trace.sent < t.times[-1] - 1e-9]
        assert len(inside) <= 4
    assert len(traces) == 23 and engine.at_once <= 4


def test_a_ramp_spreads_the_first_requests() -> None:
    traces = sent(FakeEngine(step_s=1.0), loop(6, 4, ramp=1.0))
    assert [trace.sent for trace in traces[:4]] == APPROX([0.0, 0.25, 0.5, 0.75], abs=1e-6)
    assert traces[4].sent > 9


def test_each_prompt_is_sent_once_and_in_order() -> None:
    engine, workload = FakeEngine(), loop(9, 3)
    sent(engine, workload, seed=5)
    assert [list(prompt) for _, prompt, _ in engine.seen] == prompts(workload, 5, 100)
    assert {new for _, _, new in engine.seen} == {10}


def test_waiting_shows_in_ttft_and_in_the_steps() -> None:
    """Four clients on an engine that runs two: the other two wait for a whole answer."""
    engine, workload = FakeEngine(most=2, blocks=10), loop(4, 4)
    found = figures(workload, sent(engine, workload))
    assert found["ttft_p50_ms"] == APPROX(60)  # between 10 and 110
    assert found["ttft_p99_ms"] == APPROX(110)
    assert found["tpot_p99_ms"] == APPROX(10)
    steps = engine.log.figures(blocks=100, block_bytes=2**30)
    assert steps["running_max"] == 2 and steps["waiting_max"] == 2 and steps["steps"] == 20
    assert steps["step_p50_ms"] == APPROX(10)
    # At the end of a step: two run, but none after the tenth and the twentieth.
    assert steps["running_mean"] == APPROX(1.8)
    assert (steps["kv_blocks_max"], steps["kv_gib_max"]) == (20, 20)
    assert steps["kv_blocks_mean"] == APPROX(18) and steps["kv_blocks_left"] == 0


def test_percentiles_interpolate() -> None:
    """Five requests whose TTFT are 1 to 5 s."""
    traces = [Trace(0.0, [float(i), i + 1.0], [1, 1]) for i in range(1, 6)]
    found = figures(loop(5, 5, new=2), traces)
    assert [found[f"ttft_p{p}_ms"] for p in (50, 90, 99)] == APPROX([3000, 4600, 4960])
    assert found["tpot_p50_ms"] == APPROX(1000) and found["out_tok_s"] == APPROX(10 / 6)


def test_tokens_that_come_together() -> None:
    """Three at once, then two: time per token is that of the two that came after the first."""
    found = figures(loop(1, 1, new=5), [Trace(1.0, [2.0, 4.0], [3, 2])])
    assert found["ttft_p50_ms"] == APPROX(1000) and found["tpot_p50_ms"] == APPROX(1000)
    assert found["itl_p99_ms"] == APPROX(2000)
    alone = figures(loop(1, 1, new=1), [Trace(1.0, [2.0], [1])])
    assert "tpot_p50_ms" not in alone and alone["out_tok_s"] == APPROX(1)


# ---------------------------------------------------------------------- failures


def test_failures_are_counted_and_do_not_stop_the_others() -> None:
    engine, workload = FakeEngine(fails=frozenset({1}), short=frozenset({2})), loop(6, 2)
    traces = sent(engine, workload)
    assert [trace.error for trace in traces] == [
        "", "RuntimeError: no thanks", "expected 10 tokens, got 9", "", "", "",
    ]  # fmt: skip
    found = figures(workload, traces)
    assert found["failures"] == 2
    assert found["out_tok_s"] == APPROX(4 * 10 / found["seconds"])
    assert figures(workload, [trace for trace in traces if trace.error]) == {"failures": 2.0}


def test_nothing_is_left_running_when_time_is_up() -> None:
    """The session's limit cancels every request; the workload has failed, the next one runs."""
    engine, reports = FakeEngine(), []
    session = Session(engine, 100, warmup=0, timeout=0.5)

    async def both() -> int:
        await session.all([loop(2, 2, new=1000), loop(2, 2)], lambda: False, reports.append)
        return len(asyncio.all_tasks()) - 1

    engine.step_s = 0.01
    left = run(both())
    assert [report["status"] for report in reports] == ["failed", "measured"]
    assert reports[0]["reason"] == "expected an end within 0.5 s, got none"
    assert left <= 1  # the fake's own steps; no client


def test_prompts_and_workload_must_agree() -> None:
    with pytest.raises(ValueError, match="expected 3 prompts, got 2"):
        run(drive(FakeEngine(), loop(3, 1), [[1], [2]], 0))


# ---------------------------------------------------------------------- Poisson arrivals


def test_arrivals_are_those_of_the_seed_and_the_rate() -> None:
    workload = Workload(8, 4, 50, rate=3.0)
    times = arrivals(workload, 7)
    assert times == arrivals(workload, 7) and times != arrivals(workload, 8)
    assert times[:20] == arrivals(Workload(8, 4, 20, rate=3.0), 7)
    traces = sent(FakeEngine(step_s=0.5), workload, seed=7)
    assert [trace.sent for trace in traces] == APPROX(times, abs=1e-6)


@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_arrivals_are_poisson(rate: float) -> None:
    """Gaps have the mean and the spread of an exponential law; counts by second a Poisson one."""
    count = 4000
    times = arrivals(Workload(1, 1, count, rate=rate), 0)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / count
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / count)
    assert mean == APPROX(1 / rate, rel=0.05) and spread == APPROX(mean, rel=0.07)
    assert sum(gap > 1 / rate for gap in gaps) / count == APPROX(math.exp(-1), abs=0.03)
    window = 10 / rate
    counts = [0] * int(times[-1] / window)
    for time in times:
        if time < len(counts) * window:
            counts[int(time / window)] += 1
    average = sum(counts) / len(counts)
    variance = sum((c - average) ** 2 for c in counts) / len(counts)
    assert average == APPROX(10, rel=0.05) and variance / average == APPROX(1, abs=0.2)


def test_arrivals_do_not_wait_for_answers() -> None:
    """Ten requests a second at an engine that needs 5 s for each: all are there at once."""
    engine, workload = FakeEngine(step_s=0.5), Workload(8, 10, 20, rate=10.0)
    sent(engine, workload)
    assert engine.at_once > 15


# ---------------------------------------------------------------------- prompts, workloads


def test_prompts_are_random_and_share_no_prefix() -> None:
    workload = loop(20, 4)
    texts = prompts(workload, 0, 50_000)
    assert texts == prompts(loop(20, 1), 0, 50_000) != prompts(workload, 1, 50_000)
    assert len({text[0] for text in texts}) > 15 and all(len(text) == 8 for text in texts)
    assert texts[:5] == prompts(loop(5, 1), 0, 50_000)
    assert not set(map(tuple, texts)) & set(map(tuple, prompts(workload, 0, 50_000, "warm-up")))
    ids = {token for text in prompts(Workload(500, 1, 10, rate=1.0), 0, 10) for token in text}
    assert ids == set(range(2, 10))
    with pytest.raises(ValueError, match="vocabulary of more than 2"):
        prompts(workload, 0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": 1.0}, "expected a concurrency or a rate"),
        ({"concurrency": None}, "expected a concurrency or a rate"),
        ({"concurrency": 0}, "expected a concurrency >= 1, got 0"),
        ({"concurrency": None, "rate": -1.0}, "expected a rate of arrivals > 0"),
        ({"concurrency": None, "rate": math.inf}, "expected a rate of arrivals > 0"),
        ({"requests": 0}, "expected requests >= 1, got 0"),
        ({"output_tokens": 0}, "expected output_tokens >= 1"),
        ({"prompt_tokens": -1}, "expected prompt_tokens >= 1"),
        ({"ramp": -1.0}, "expected a ramp >= 0"),
    ],
)
def test_workloads_that_mean_nothing(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(**{**loop(3, 1).plain(), **change})


def test_loads_for_each_length() -> None:
    """Every length at every concurrency and rate, but for one that says its own concurrency."""
    lengths = [Length(8, 4), Length(9, 5, 2)]
    loops = list(closed(lengths, [1, 40], 3, 1.5))
    found = [(w.prompt_tokens, w.output_tokens, w.concurrency, w.requests) for w in loops]
    assert found == [(8, 4, 1, 3), (8, 4, 40, 120), (9, 5, 2, 6)]
    assert {w.ramp for w in loops} == {1.5} and loops[0].shape["ramp"] == 1.5
    rates = [(w.prompt_tokens, w.rate, w.requests) for w in poisson(lengths, [1, 2.5], 7)]
    assert rates == [(8, 1, 7), (8, 2.5, 7)]
    assert Workload(**loops[1].plain()) == loops[1]


# ---------------------------------------------------------------------- a session


def test_warm_up_comes_first_and_does_not_count() -> None:
    engine, reports = FakeEngine(), []
    log = StepLog()
    engine.log = log
    session = Session(engine, 100, warmup=3, log=log, blocks=100, block_bytes=1.0)
    workloads = [Workload(8, 200, 2, concurrency=1), Workload(16, 5, 2, concurrency=2)]
    run(session.all(workloads, lambda: False, reports.append))
    lengths = [(len(prompt), new) for _, prompt, new in engine.seen]
    assert lengths == [(8, 64)] * 3 + [(8, 200)] * 2 + [(16, 5)] * 3 + [(16, 5)] * 2
    assert [report["figures"]["steps"] for report in reports] == [400, 5]
    assert [report["workload"] for report in reports] == [0, 1]


def test_late_workloads_are_not_run() -> None:
    engine, reports = FakeEngine(), []
    answers = iter([False, True, True])
    session = Session(engine, 100, warmup=0)
    run(session.all([loop(1, 1)] * 3, lambda: next(answers), reports.append))
    assert [(r["status"], r["reason"]) for r in reports] == [
        ("measured", ""), ("not run", "out of time"), ("not run", "out of time"),
    ]  # fmt: skip
    assert len(engine.seen) == 1


def test_an_engine_that_refuses_everything_has_failed() -> None:
    engine, reports = FakeEngine(fails=frozenset(range(9))), []
    run(Session(engine, 100, warmup=2).all([loop(3, 2)], lambda: False, reports.append))
    assert reports[0]["status"] == "failed"
    assert reports[0]["reason"] == "3 of 3 requests failed: RuntimeError: no thanks"


def test_steps_after_an_idle_time_have_no_length() -> None:
    """Nothing ran between 0.02 and 5 s: no step lasted five seconds."""
    log = StepLog()
    for time, running in ((0.01, 1), (0.02, 0), (5.0, 1), (5.01, 0)):
        log.clock = lambda time=time: time
        log.add(running, 0, 0.0, 2)
    found = log.figures(10, 1.0)
    assert found["step_mean_ms"] == APPROX(10) and found["preemptions"] == 8
    assert StepLog().figures(10, 1.0) == {}
