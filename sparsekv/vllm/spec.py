"""vLLM's side of the layout: a KV cache spec, and the manager that frees what the layout says.

`remove_skipped_blocks` runs in the scheduler before each step of a request. It frees by the counts
of the call before, a step late, so that a worker has always moved what it wants to keep first.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from sparsekv.vllm.layout import Layout
from sparsekv.vllm.settings import Settings

_MAX_REPLAYS = 1 << 16  # finished requests are told apart from preempted ones by their age alone


@dataclass(frozen=True, kw_only=True)
class PinnedWindowSpec(SlidingWindowSpec):
    """Layers that hold `pinned_tokens` and the newest `sliding_window` tokens of a request."""

    pinned_tokens: int
    grows: bool

    @classmethod
    def of(
        cls, spec: SlidingWindowSpec, settings: Settings, block_size: int, tier: int
    ) -> PinnedWindowSpec:
        """The spec of a sparse layer, from the windowed one that vLLM made of it."""
        layout = settings.layout(block_size, tier)
        kept = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.init}
        kept["sliding_window"] = layout.recent
        pinned = layout.pinned_blocks * block_size
        return cls(**kept, pinned_tokens=pinned, grows=layout.grows)

    @property
    def layout(self) -> Layout:
        """The layout in blocks of this spec."""
        pinned, rest = divmod(self.pinned_tokens, self.block_size)
        if rest:
            raise ValueError(
                f"expected blocks that divide {self.pinned_tokens} pinned tokens, got blocks of "
                f"{self.block_size}: pass block_size"
            )
        return Layout(self.block_size, pinned, self.sliding_window, self.grows)

    @property
    def prefix_cacheable(self) -> bool:
        """False: pinned blocks no longer hold the tokens that their hash names."""
        return False

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Blocks at the end of the longest prompt, which is attended in full."""
        return -(-max_model_len // self.block_size)


class PinnedWindowManager(SingleTypeKVCacheManager):
    """Frees blocks [P, f) of each request; see `layout`."""

    def __init__(self, kv_cache_spec: PinnedWindowSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.layout = kv_cache_spec.layout
        self._processed: dict[str, int] = {}
        self._allocated: dict[str, int] = {}
        self._replays: OrderedDict[str, int] = OrderedDict()

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """As every manager; notes how far the request has come."""
        self._allocated[request_id] = num_tokens
        return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Free what the layout no longer holds, by the processed tokens of the call before."""
        computed = self._processed.get(request_id, 0)
        self._processed[request_id] = processed_computed_tokens
        if num_prompt_tokens is None:
            return
        # A preempted request is read again from its start, generated tokens included.
        prompt = max(num_prompt_tokens, self._replays.get(request_id, 0))
        if computed < prompt:
            return
        first = self.layout.first_recent(num_prompt_tokens if self.layout.grows else computed)
        self._remove_blocks_in_range(request_id, self.layout.pinned_blocks, first)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """As every manager; remembers how much a preempted request will have to read again."""
        self._processed.pop(request_id, None)
        if (tokens := self._allocated.pop(request_id, None)) is not None:
            # The token sampled last may come on top.
            self._replays[request_id] = max(tokens + 1, self._replays.pop(request_id, 0))
            if len(self._replays) > _MAX_REPLAYS:
                self._replays.popitem(last=False)
        return super().pop_blocks_for_free(request_id)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """0: requests share no blocks."""
        return 0

    @classmethod
    def find_longest_cache_hit(cls, *args: Any, **kwargs: Any) -> Any:
        """There is no prefix cache."""
        raise ValueError("expected prefix caching off with sparsekv, got a look-up")
