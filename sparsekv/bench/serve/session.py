"""All workloads of one engine, in turn: warm up, measure, report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sparsekv.bench.results import FAILED, MEASURED, NOT_RUN
from sparsekv.bench.serve.figures import figures
from sparsekv.bench.serve.load import Engine, Trace, drive, reason
from sparsekv.bench.serve.steps import StepLog
from sparsekv.bench.serve.workload import Workload, prompts

_WARM_TOKENS = 64  # two of the plugin's blocks: whatever happens at a block's end has happened
Report = dict[str, Any]


@dataclass(frozen=True)
class Session:
    """An engine that is up, and how it is measured.

    vocab: prompts are drawn from [2, vocab). seed: of prompts and arrivals. warmup: requests sent
    before each workload, of its prompt length, all at once. timeout: seconds a workload may take.
    log, blocks, block_bytes: the engine's own steps and its pool, where they can be had.
    """

    engine: Engine
    vocab: int
    seed: int = 0
    warmup: int = 4
    timeout: float = 600.0
    log: StepLog | None = None
    blocks: int = 0
    block_bytes: float = 0.0

    async def all(
        self,
        workloads: Sequence[Workload],
        late: Callable[[], bool],
        tell: Callable[[Report], None],
    ) -> None:
        """Measure every workload; `tell` is called with the report of each as soon as it is over.

        late: asked before each; once it says yes, those to come are reported as not run. A report
        has the workload's index, a status, a reason ("" if all is well) and figures.
        """
        for index, workload in enumerate(workloads):
            report: Report = {"workload": index, "reason": "", "figures": {}}
            if late():
                report |= {"status": NOT_RUN, "reason": "out of time"}
            else:
                try:
                    report |= await asyncio.wait_for(self._measured(workload), self.timeout)
                except asyncio.TimeoutError:
                    limit = f"expected an end within {self.timeout:g} s, got none"
                    report |= {"status": FAILED, "reason": limit}
                except Exception as error:  # of the engine itself, not of one request
                    report |= {"status": FAILED, "reason": reason(error)}
            tell(report)

    async def _measured(self, workload: Workload) -> Report:
        await self._warm_up(workload)
        texts = prompts(workload, self.seed, self.vocab)
        if self.log is not None:
            self.log.clear()
        traces = await drive(self.engine, workload, texts, self.seed)
        found = figures(workload, traces)
        if self.log is not None:
            found |= self.log.figures(self.blocks, self.block_bytes)
        status = MEASURED if "out_tok_s" in found else FAILED
        return {"status": status, "reason": _first_error(traces), "figures": found}

    async def _warm_up(self, workload: Workload) -> None:
        """Shapes that are compiled at their first use are compiled here. Errors come up later."""
        if self.warmup:
            new = min(workload.output_tokens, _WARM_TOKENS)
            warm = Workload(workload.prompt_tokens, new, self.warmup, concurrency=self.warmup)
            texts = prompts(warm, self.seed, self.vocab, "warm-up")
            await drive(self.engine, warm, texts, self.seed)


def _first_error(traces: Sequence[Trace]) -> str:
    errors = [trace.error for trace in traces if trace.error]
    return f"{len(errors)} of {len(traces)} requests failed: {errors[0]}" if errors else ""
