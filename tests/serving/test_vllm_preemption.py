"""A pool too small for its requests, one of them aborted: nothing is lost, nothing changed."""

from __future__ import annotations

import pytest
from engines import generate, needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow]

SIZE = {"budget": 288, "recent": 32}
LENGTHS, NEW = (300, 330, 310, 290), 100


# h2o's sparse layers hold no more as text grows: less room is needed for it to be too little.
@pytest.mark.parametrize(("policy", "mib"), [("snapkv", 34), ("h2o", 30)])
def test_preempted_and_aborted(policy: str, mib: int) -> None:
    settings = {"policy": policy, **SIZE}
    calm = generate(LENGTHS, NEW, settings, max_model_len=448)
    tight = generate(
        LENGTHS, NEW, settings, {"2": 8}, max_model_len=448, kv_cache_memory_bytes=mib << 20
    )
    assert sum(tight["preempted"].values()) > 0 and sum(calm["preempted"].values()) == 0
    for out in (calm, tight):
        assert out["leaked_blocks"] == 0 and out["left_behind"] == 0
    assert {"0", "1", "3"} <= set(tight["answers"])
    for key in ("0", "1", "3"):
        assert len(tight["answers"][key]["tokens"]) == NEW
        # What is read again is attended in full: only undisturbed requests must be the same.
        if not tight["preempted"][key]:
            assert tight["answers"][key]["tokens"] == calm["answers"][key]["tokens"], key
