"""`sparsekv serve`, the arguments for vLLM, and what is refused. The server itself: slow."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from engines import environment, model, needs_vllm
from typer.testing import CliRunner

from sparsekv.cli import APP
from sparsekv.evaluation.results import read_records
from sparsekv.vllm.cli import parse_option
from sparsekv.vllm.refusals import check
from sparsekv.vllm.settings import Settings

DATA = Path(__file__).parents[3] / "shared/data"


def config(**changes: object) -> SimpleNamespace:
    """A VllmConfig, as far as it is looked at, that goes with sparse layers."""
    fine = {
        "cache_config.enable_prefix_caching": False,
        "cache_config.cache_dtype": "auto",
        "cache_config.kv_sharing_fast_prefill": False,
        "model_config.use_mla": False,
        "kv_transfer_config": None,
        "speculative_config": None,
        "parallel_config.decode_context_parallel_size": 1,
        "parallel_config.enable_dbo": False,
        "parallel_config.tensor_parallel_size": 1,
        "scheduler_config.disable_hybrid_kv_cache_manager": False,
        "scheduler_config.enable_chunked_prefill": True,
    }
    found = SimpleNamespace()
    for name, value in {**fine, **changes}.items():
        *parents, last = name.split(".")
        place = found
        for parent in parents:
            if not hasattr(place, parent):
                setattr(place, parent, SimpleNamespace())
            place = getattr(place, parent)
        setattr(place, last, value)
    return found


@pytest.mark.parametrize(
    ("change", "value", "match"),
    [
        ("cache_config.enable_prefix_caching", True, "enable_prefix_caching=False"),
        ("kv_transfer_config", object(), "no KV connector"),
        ("speculative_config", object(), "no speculative decoding"),
        ("model_config.use_mla", True, "no MLA"),
        ("parallel_config.decode_context_parallel_size", 2, "decode_context_parallel_size=1"),
        ("parallel_config.enable_dbo", True, "enable_dbo=False"),
        ("cache_config.kv_sharing_fast_prefill", True, "kv_sharing_fast_prefill"),
        ("cache_config.cache_dtype", "fp8", "unquantised"),
        ("scheduler_config.disable_hybrid_kv_cache_manager", True, "hybrid KV cache manager"),
    ],
)
def test_what_does_not_go_together(change: str, value: object, match: str) -> None:
    settings = Settings("snapkv", 512)
    check(config(), settings)
    with pytest.raises(ValueError, match=match):
        check(config(**{change: value}), settings)


def test_tova_needs_all_heads() -> None:
    ranks = config(**{"parallel_config.tensor_parallel_size": 2})
    check(ranks, Settings("snapkv", 512))
    with pytest.raises(ValueError, match="tensor_parallel_size=1"):
        check(ranks, Settings("tova", 512))


def test_chunked_prefill_needs_chunks() -> None:
    whole = config(**{"scheduler_config.enable_chunked_prefill": False})
    check(whole, Settings("snapkv", 512))
    with pytest.raises(ValueError, match="chunked prefill"):
        check(whole, Settings("snapkv", 512, prefill="chunked"))


def test_streaming_takes_a_quantised_cache() -> None:
    check(config(**{"cache_config.cache_dtype": "fp8"}), Settings("streaming", 512))


@pytest.mark.parametrize(
    ("text", "value"), [("sinks=128", 128), ("a=0.5", 0.5), ("pool=avg", "avg")]
)
def test_options(text: str, value: object) -> None:
    assert parse_option(text)[1] == value
    with pytest.raises(ValueError, match="name=value"):
        parse_option(text.replace("=", ""))


@needs_vllm
@pytest.mark.parametrize("name", ["budget", "recent", "policy", "model", "block_size"])
def test_options_of_serve_itself(name: str) -> None:
    done = CliRunner().invoke(APP, ["serve", "somewhere", "--option", f"{name}=5", "--dry-run"])
    assert done.exit_code == 2, done.exception
    assert f"a hyper-parameter of the policy, got ['{name}']" in done.output


@needs_vllm
def test_plan_and_command() -> None:
    line = ["serve", model(), "--policy", "streaming", "--budget", "384", "--option", "sinks=128"]
    done = CliRunner().invoke(APP, [*line, "--dry-run", "--port", "8123"])
    assert done.exit_code == 0, done.output
    assert "27 keep 128 pinned and 256 recent tokens" in done.output
    assert "--no-enable-prefix-caching" in done.output and "--port 8123" in done.output
    assert "while a prompt is read it is held whole" in done.output
    done = CliRunner().invoke(APP, [*line, "--dry-run", "--prefill", "chunked"])
    assert done.exit_code == 0 and "two chunks" in done.output
    assert '"prefill": "chunked"' in done.output


@needs_vllm
def test_options_of_a_user_join_ours() -> None:
    """vLLM takes the last of two options: layers would be dense, or plain windows."""
    line = ["serve", model(), "--policy", "streaming", "--budget", "384", "--dry-run"]
    theirs = ["--hf-overrides", '{"rope_theta": 20000.0}', '--additional_config={"x": 1}']
    done = CliRunner().invoke(APP, [*line, *theirs, "--port", "8123"])
    assert done.exit_code == 0, done.output
    assert done.output.count("--hf-overrides") == done.output.count("--additional") == 1
    for part in ('"rope_theta": 20000.0}', '"layer_types": [', '"x": 1}', '{"sparsekv": {'):
        assert part in done.output
    for wrong, said in (
        (["--hf-overrides", '{"sliding_window": 64}'], "--hf-overrides without sliding_window"),
        (["--hf-overrides.rope_theta", "2"], "--hf-overrides as one JSON object"),
        (["--hf-overrides", "rope"], "--hf-overrides to be a JSON object"),
    ):
        done = CliRunner().invoke(APP, [*line, *wrong])
        assert done.exit_code == 2 and said in done.output, done.output


@needs_vllm
def test_plan_of_tiers() -> None:
    from sparsekv.vllm import llm_kwargs
    from sparsekv.vllm.launch import plan

    lines = plan(llm_kwargs(model(), policy="pyramid", budget=384, recent=256)).splitlines()
    tiers = ", ".join(f"9 keep {n} pinned and 256 recent" for n in (224, 128, 32))
    assert f"3 layers keep every token, {tiers} tokens a KV head and what is" in lines[0]
    # 4000 tokens: 125 blocks, of which the first 117 but for the pinned ones go; and a new one.
    held = 3 * 125 + 9 * (7 + 9) + 9 * (4 + 9) + 9 * (1 + 9)
    assert f"{30 * 125 / held:.1f} times" in lines[3]


@needs_vllm
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"full_layers": 30}, "full_layers below 30"),
        ({"policy": "pyramid", "tiers": 4}, "equal size, got 27: full_layers=2 or 6 would do"),
        ({"policy": "quest"}, "policy to be one of"),
        ({"budget": 40}, "whole blocks"),
    ],
)
def test_refused_before_anything_is_loaded(changes: dict, match: str) -> None:
    from sparsekv.vllm import llm_kwargs

    with pytest.raises(ValueError, match=match):
        llm_kwargs(model(), **{"policy": "snapkv", "budget": 512, **changes})


@needs_vllm
def test_models_that_would_not_obey() -> None:
    from transformers import LlamaConfig, Qwen3MoeConfig

    from sparsekv.vllm.arguments import sparse_layers

    settings = Settings("snapkv", 512)
    fine = LlamaConfig(num_hidden_layers=6, architectures=["LlamaForCausalLM"])
    assert sparse_layers(fine, settings).count("sliding_attention") == 3
    experts = Qwen3MoeConfig(num_hidden_layers=6, architectures=["Qwen3MoeForCausalLM"])
    # The others read `layer_types`, but not for windows alone; the last is no decoder.
    others = ("Exaone4ForCausalLM", "CohereForCausalLM", "AfmoeForCausalLM", "LlamaModel")
    for config in (experts, *(LlamaConfig(architectures=[name]) for name in others)):
        with pytest.raises(ValueError, match="nothing but their window from layer_types"):
            sparse_layers(config, settings)
    fine.sliding_window = 64
    with pytest.raises(ValueError, match="full-attention layers"):
        sparse_layers(fine, settings)


@needs_vllm
@pytest.mark.slow
def test_openai_server(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    line = [sys.executable, "-m", "sparsekv", "serve", model(), "--policy", "layersplit"]
    line += ["--budget", "384", "--enforce-eager", "--port", str(port), "--host", "127.0.0.1"]
    line += ["--max-model-len", "2048", "--max-num-seqs", "4", "--served-model-name", "m"]
    server = subprocess.Popen(line, env={**environment(), "VLLM_CPU_KVCACHE_SPACE": "1"})
    try:
        _wait(f"http://127.0.0.1:{port}/health", server)
        url = f"http://127.0.0.1:{port}/v1/completions"
        prompt = "A list of facts about rivers, lakes, seas and their fish. " * 60
        body = {"model": "m", "prompt": prompt, "max_tokens": 40, "temperature": 0, "logprobs": 1}
        answer = _post(url, body)
        text = answer["choices"][0]["text"]
        assert answer["usage"]["completion_tokens"] == 40 and "rivers, lakes" in text
        assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 40
        several = _post(url, {**body, "n": 2, "temperature": 0.7, "seed": 1})
        assert len(several["choices"]) == 2
        stopped = _post(url, {**body, "stop": [" lakes"]})["choices"][0]
        assert stopped["finish_reason"] == "stop" and stopped["text"] == text.split(" lakes")[0]
        _ask_needles(f"http://127.0.0.1:{port}/v1", tmp_path)
    finally:
        server.terminate()
        server.wait(timeout=60)


def _ask_needles(base_url: str, out: Path) -> None:
    """`sparsekv eval served`, where its texts are: most of 8 needles in 1024 tokens are found."""
    if not DATA.is_dir():
        return
    line = ["eval", "served", "--base-url", base_url, "--model", model(), "--data", str(DATA)]
    line += ["--tasks", "needle-1k", "--samples", "1", "--policy", "layersplit", "--budget", "384"]
    done = CliRunner().invoke(APP, [*line, "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = [record.em for record in read_records(out)]
    assert len(found) == 8 and sum(found) >= 5


def _post(url: str, body: dict) -> dict:
    data, header = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, header)
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


def _wait(url: str, server: subprocess.Popen) -> None:
    for _ in range(600):
        assert server.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise TimeoutError(url)
