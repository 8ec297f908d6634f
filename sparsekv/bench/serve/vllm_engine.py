"""vLLM's own engine in this process' event loop: AsyncLLM, with a logger that notes its steps.

Runs on vLLM 0.26 to 0.33. vLLM is imported when an engine is started, and not before.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.metadata import entry_points
from typing import Any

from sparsekv.bench.serve.kv_memory import NAME as KV_MEMORY
from sparsekv.bench.serve.steps import StepLog

PLUGIN = "sparsekv"


class VllmEngine:
    """A running AsyncLLM.

    arguments: of `vllm.AsyncEngineArgs`. log: where its steps are noted.
    """

    def __init__(self, arguments: dict[str, Any], log: StepLog) -> None:
        from vllm import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        given = AsyncEngineArgs(
            **arguments, worker_extension_cls=KV_MEMORY, disable_log_stats=True
        )  # fmt: skip
        # The context decides defaults, such as the tokens of a step: those of a server.
        self.llm = AsyncLLM.from_engine_args(
            given, usage_context=UsageContext.OPENAI_API_SERVER, stat_loggers=[stat_logger(log)]
        )
        self.sent = 0

    async def about(self) -> dict[str, Any]:
        """Vocabulary, KV pool (blocks, bytes, tokens of a block), device and version."""
        import vllm
        from vllm.platforms import current_platform

        config = self.llm.vllm_config
        # One block of the pool is vLLM's null block, which nobody can hold.
        total = config.cache_config.num_gpu_blocks
        kv_bytes = sum(await self.llm.collective_rpc("sparsekv_kv_bytes"))
        return {
            "vocab": config.model_config.get_vocab_size(),
            "blocks": total - 1,
            "block_bytes": kv_bytes / total,
            "block_size": config.cache_config.block_size,
            "step_tokens": config.scheduler_config.max_num_batched_tokens,
            "device": current_platform.get_device_name(),
            "vllm": vllm.__version__,
        }

    async def generate(self, prompt: list[int], new: int) -> AsyncIterator[int]:
        """Numbers of new tokens as they come. Greedy; the end-of-text token ends nothing.

        `ignore_eos` alone makes the length exact; `min_tokens` would add work to every step.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        self.sent += 1
        name = f"request-{self.sent}"
        async for output in self.llm.generate({"prompt_token_ids": prompt}, sampling, name):
            if count := len(output.outputs[0].token_ids):
                yield count

    def shutdown(self) -> None:
        """End the engine's processes and give its memory back."""
        self.llm.shutdown()
        del self.llm  # or it would be shut down again while the interpreter ends


def stat_logger(log: StepLog) -> type[Any]:
    """A class for `stat_loggers` whose instances note every step in `log`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Steps(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self.engine_index = engine_index

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any
        ) -> None:
            if scheduler_stats is not None:
                preempted = 0 if iteration_stats is None else iteration_stats.num_preempted_reqs
                waiting = (
                    scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
                )
                running, held = scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage
                log.add(running, waiting, held, preempted)

        def log_engine_initialized(self) -> None:
            pass

    return Steps


def check_plugin() -> None:
    """Without its plugin vLLM would run the sparse layers as plain windows, and say nothing.

    Raises RuntimeError if sparsekv is not installed where vLLM looks; whatever its import raises.
    """
    found = entry_points(group="vllm.general_plugins", name=PLUGIN)
    if not found:
        raise RuntimeError(
            "expected vLLM to find the plugin of an installed sparsekv (pip install), got none"
        )
    for entry in found:
        entry.load()
