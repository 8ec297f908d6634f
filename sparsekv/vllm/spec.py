"""vLLM's side of the layout: a KV cache spec, and the manager that frees what the layout says.

`remove_skipped_blocks` runs in the scheduler before each step of a request. It frees what the
request's last step, whose worker moves what it keeps before anything else, no longer held: a step
late, so that a block is never given away first. Steps run in order, so this holds for one that is
still on its way, too.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec

from sparsekv.vllm.layout import Layout
from sparsekv.vllm.settings import Settings

_MAX_REPLAYS = 1 << 16  # finished requests are told apart from preempted ones by their age alone


@dataclass(frozen=True, kw_only=True)
class PinnedWindowSpec(SlidingWindowSpec):
    """Layers that hold `pinned_tokens` and the newest `sliding_window` tokens of a request.

    chunk: tokens of a chunk of a prompt, at most, where prompts are cut chunk by chunk; else 0.
    """

    pinned_tokens: int
    grows: bool
    chunk: int

    @classmethod
    def of(
        cls, spec: SlidingWindowSpec, settings: Settings, block_size: int, tier: int, chunk: int
    ) -> PinnedWindowSpec:
        """The spec of a sparse layer, from the windowed one that vLLM made of it."""
        layout = settings.layout(block_size, tier)
        kept = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.init}
        kept["sliding_window"] = layout.recent
        pinned = layout.pinned_blocks * block_size
        return cls(**kept, pinned_tokens=pinned, grows=layout.grows, chunk=chunk)

    @property
    def layout(self) -> Layout:
        """The layout in blocks of this spec."""
        pinned, rest = divmod(self.pinned_tokens, self.block_size)
        if rest:
            raise ValueError(
                f"expected blocks that divide {self.pinned_tokens} pinned tokens, got blocks of "
                f"{self.block_size}: pass block_size"
            )
        return Layout(self.block_size, pinned, self.sliding_window, self.grows, self.chunk > 0)

    @property
    def prefix_cacheable(self) -> bool:
        """False: pinned blocks no longer hold the tokens that their hash names."""
        return False

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """The most that a request ever holds: what admits it, and what the pool must have.

        All of the longest prompt if it is attended in full, or where all that is generated stays.
        """
        whole = -(-max_model_len // self.block_size)
        if self.grows or not self.chunk:
            return whole
        return min(whole, self.layout.most_blocks_read_chunked(self.chunk))

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether all layers hold alike: those that pin more or less are no group of vLLM's."""
        ours = (self.layout, self.chunk)
        return all(
            isinstance(spec, PinnedWindowSpec) and (spec.layout, spec.chunk) == ours
            for spec in kv_cache_specs.values()
        )


@dataclass(slots=True)
class _Progress:
    """Tokens of a request: cached before its last step (`begun`), and after it; of its prompt in
    that step; what its blocks have room for; with how many cached the next block must go, as far as
    that is known. complete: its prompt, in a session the first one, has been read.
    """

    begun: int = 0
    allocated: int = 0
    prompt: int = 0
    room: int = 0
    next_cut: float = 0
    complete: bool = False


class PinnedWindowManager(SingleTypeKVCacheManager):
    """Frees blocks [P, f) of each request; see `layout`.

    vLLM asks each group of layers three times a step and request. Most have no answer but "nothing"
    until the next block, and say so first: the scheduler would hold up the GPU otherwise.
    """

    def __init__(self, kv_cache_spec: PinnedWindowSpec, *args: Any, **kwargs: Any) -> None:
        self.layout = kv_cache_spec.layout
        if kv_cache_spec.chunk:
            # To be admitted; what is generated comes on top only later, as in a full layer.
            most = self.layout.most_blocks_read_chunked(kv_cache_spec.chunk)
            kwargs["max_admission_blocks_per_request"] = most
        super().__init__(kv_cache_spec, *args, **kwargs)
        self._progress: dict[str, _Progress] = {}
        self._replays: OrderedDict[str, int] = OrderedDict()

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """As every manager."""
        known = self._progress.get(request_id)
        if known is not None and num_tokens <= known.room:
            return 0
        return super().get_num_blocks_to_allocate(request_id, num_tokens, *args, **kwargs)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """As every manager; notes how far the request has come."""
        known = self._progress.get(request_id)
        if known is None:
            known = self._progress[request_id] = _Progress()
        known.begun, known.allocated = known.allocated, num_tokens
        if num_tokens <= known.room:
            return []
        blocks = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        known.room = len(self.req_to_blocks[request_id]) * self.block_size
        return blocks

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Free what the layout did not hold any more in the request's last step."""
        known = self._progress.get(request_id)
        if known is None or num_prompt_tokens is None:
            return
        prompt = known.prompt or num_prompt_tokens
        if num_prompt_tokens != known.prompt:
            if known.prompt:  # a session goes on, without the steps that ran ahead of its answer
                known.allocated = min(known.allocated, processed_computed_tokens)
            known.prompt = num_prompt_tokens
        if known.begun < known.next_cut:
            return
        begun, layout = known.begun, self.layout
        # A preempted request is read again from its start, generated tokens included.
        known.complete |= begun >= max(prompt, self._replays.get(request_id, 0))
        if not known.complete and not layout.chunked:
            return
        first = layout.first_recent(min(begun, prompt) if layout.grows else begun)
        self._remove_blocks_in_range(request_id, layout.pinned_blocks, first)
        if not layout.grows:
            known.next_cut = layout.recent + (first + 1) * layout.block_size
        elif known.complete:
            known.next_cut = float("inf")

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """As every manager; remembers how much a preempted request will have to read again."""
        if (known := self._progress.pop(request_id, None)) is not None:
            # The token sampled last may come on top.
            replay = max(known.allocated + 1, self._replays.pop(request_id, 0))
            self._replays[request_id] = replay
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
