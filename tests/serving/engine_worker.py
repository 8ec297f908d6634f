"""One vLLM engine in a process of its own: `python engine_worker.py JOB.json OUT.json`.

JOB: {"kwargs": for vllm.LLM, "prompts": token ids, "new_tokens": int or one a prompt,
"abort": {request: step}, "adapter": folder of a LoRA for all prompts, or None}.
OUT: tokens and log-probabilities of each request, KV bytes in use after every step and how many
requests had finished and were running then, preemptions, how many tokens of an aborted request were
cached, how many tokens of each request a step had, and blocks not given back, all from vLLM's own
scheduler and block pool; and the classes at work.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler is looked at


def run(job: dict) -> dict:
    from vllm import LLM, SamplingParams

    engine = LLM(**job["kwargs"]).llm_engine
    core = engine.engine_core.engine_core
    pool = core.scheduler.kv_cache_manager.block_pool
    config = core.scheduler.kv_cache_config
    # Groups of layers share the pool's tensors: a block is one part in num_blocks of all of it.
    block_bytes = job["kwargs"]["kv_cache_memory_bytes"] / config.num_blocks
    free, chunks = pool.get_num_free_blocks(), _chunks(core.scheduler)
    new = job["new_tokens"]
    for i, prompt in enumerate(job["prompts"]):
        count = new if isinstance(new, int) else new[i]
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0)
        more = {"lora_request": _lora(job["adapter"])} if job.get("adapter") else {}
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params, **more)
    done, used, finished, running, preempted, aborted, step = {}, [], [], [], {}, {}, 0
    while engine.has_unfinished_requests():
        for request, when in job.get("abort", {}).items():
            if when == step:
                aborted |= _cached(core.scheduler, request)
                engine.abort_request([request])
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output.outputs[0]
        for request in core.scheduler.requests.values():
            preempted[request.request_id.split("-")[0]] = request.num_preemptions
        used.append((free - pool.get_num_free_blocks()) * block_bytes)
        finished.append(len(done))
        running.append(len(core.scheduler.running))
        step += 1
    answers = {
        key: {
            "tokens": list(out.token_ids),
            "logprobs": [d[t].logprob for t, d in zip(out.token_ids, out.logprobs, strict=True)],
        }
        for key, out in done.items()
    }
    return {
        "answers": answers,
        "used_bytes": used,
        "finished": finished,
        "running": running,
        "preempted": preempted,
        "aborted": aborted,
        "chunks": chunks,
        "classes": {"manager": _managers(core.scheduler), **core.collective_rpc(_classes)[0]},
        "leaked_blocks": free - pool.get_num_free_blocks(),
        "left_behind": _left_behind(core.scheduler),
    }


def _lora(folder: str):
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, folder)


def _chunks(scheduler) -> dict[str, list[int]]:
    """{request: tokens that each of its steps had}, filled from now on."""
    original, found = scheduler.schedule, {}

    def schedule(*args, **kwargs):
        output = original(*args, **kwargs)
        for request, count in output.num_scheduled_tokens.items():
            found.setdefault(request.split("-")[0], []).append(count)
        return output

    scheduler.schedule = schedule
    return found


def _managers(scheduler) -> list[str]:
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return sorted({f"{type(m).__module__}.{type(m).__qualname__}" for m in managers})


def _classes(worker) -> dict[str, list[str]]:
    """Of attention, in the worker's process, with what they hold beside what vLLM gives them."""
    runner = worker.model_runner
    groups = [group for groups in runner.attn_groups for group in groups]
    builders = [builder for group in groups for builder in group.metadata_builders]
    layers = runner.compilation_config.static_forward_context.values()
    impls = [layer.impl for layer in layers if hasattr(layer, "impl")]
    states = [getattr(b, "_tracker", None) for b in builders]
    states += [getattr(i, name, None) for i in impls for name in ("ring", "sums")]

    def names(found) -> list[str]:
        return sorted({f"{cls.__module__}.{cls.__qualname__}" for cls in found})

    return {
        "spec": names(type(group.kv_cache_spec) for group in groups),
        "backend": names(group.backend for group in groups),
        "builder": names(map(type, builders)),
        "impl": names(map(type, impls)),
        "state": names(type(state) for state in states if state is not None),
    }


def _cached(scheduler, request: str) -> dict[str, int]:
    """{request: its cached tokens}; empty if it is no longer there."""
    every = {r.request_id.split("-")[0]: r for r in scheduler.requests.values()}
    return {request: every[request].num_computed_tokens} if request in every else {}


def _left_behind(scheduler) -> int:
    """Requests that some manager of a group still knows."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return sum(len(m.req_to_blocks) for m in managers)


if __name__ == "__main__":
    result = run(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
