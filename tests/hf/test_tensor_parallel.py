"""Two gloo ranks under torchrun: the ranks together do what a single process does.

Scores and selections are per KV head, so ranks need no communication of their own (B71, B73).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import tiny_llama
from tensor_parallel_worker import BUDGET, BY_RANK, NEW, POLICIES, observe

HERE = Path(__file__).parent
WORKER = HERE / "tensor_parallel_worker.py"
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
UNEVEN = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}


def unavailable() -> str | None:
    """Why no two processes can meet on this machine, or None."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return "this torch is built without torch.distributed and gloo"
    try:
        torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        return f"no TCP socket on localhost: {error}"
    return None


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks saw."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("tensor_parallel")
    tiny_llama(**HEADS).save_pretrained(folder / "even")
    tiny_llama(**UNEVEN).save_pretrained(folder / "uneven")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    # Without a GPU transformers chooses gloo; two ranks cannot share one GPU.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run(
        [*command, str(WORKER), str(folder)],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    """What one process saw with the same weights."""
    return observe(tiny_llama(**HEADS))


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in BY_RANK])
def test_ranks_equal_single_process(
    policy: str, ranks: list[dict[str, Any]], single: dict[str, Any]
) -> None:
    """The same tokens on every rank; the kept sets of the ranks' heads side by side are the same.

    Each rank holds half of the pages.
    """
    want = single[policy]
    got = [rank["even"][policy] for rank in ranks]
    assert [rank["tokens"] for rank in got] == [want["tokens"]] * 2
    for row, layers in enumerate(want["kept"]):
        for layer, heads in enumerate(layers):
            shards = [rank["kept"][row][layer] for rank in got]
            assert [len(shard) for shard in shards] == [2, 2]
            assert shards[0] + shards[1] == heads, (row, layer)
    assert [rank["pages"] for rank in got] == [want["pages"] // 2] * 2


@pytest.mark.parametrize("policy", BY_RANK)
def test_ranks_that_share_among_their_own_heads(policy: str, ranks: list[dict[str, Any]]) -> None:
    """The same tokens on every rank, and the planned total in each layer of each."""
    got = [rank["even"][policy] for rank in ranks]
    assert got[0]["tokens"] == got[1]["tokens"]
    for rank in got:
        for layers in rank["kept"]:
            totals = [sum(map(len, heads)) for heads in layers]
            assert totals == [2 * (BUDGET + NEW - 1)] * 3


def test_heads_that_decide_together_are_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["together"]["error"].startswith(
            "expected a model on one device for policy 'chunked', which has to know all heads"
        )


def test_heads_that_do_not_divide(ranks: list[dict[str, Any]]) -> None:
    """transformers itself would fail with a shape error in its first forward."""
    reason = "expected the KV heads to divide among 2 tensor-parallel ranks, got 3"
    for rank in ranks:
        assert rank["uneven"]["error"] == reason
        assert rank["uneven"]["attention"] != "sparsekv"
