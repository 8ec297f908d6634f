"""Which blocks of a request a sparse layer holds: pinned | freed | recent, from token counts alone.

vLLM frees blocks in its scheduler, scores live in the workers. Nothing is sent between them: both
compute the same two numbers. With P pinned blocks of `block_size` tokens, and c computed tokens,

    blocks [0, P)     pinned   what the policy keeps: sinks, or the best-scored tokens
    blocks [P, f)     freed    f = max(P, (c - recent) // block_size)
    blocks [f, ..)    recent   at least the newest `recent` tokens, at most block_size - 1 more

Until its prompt is complete a request holds everything (f = P), unless it is read *chunked*: then f
moves with every chunk, before the next one is read. Where a policy only grows after the prompt, c
stays the prompt's length from then on. A session whose inputs come one by one has one prompt, the
first: what comes later is held as generated tokens are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """Blocks of a sparse layer; `grows`: nothing goes any more once the prompt has been cut.

    chunked: a prompt is cut after each of the chunks in which it is read, not when it is complete.
    """

    block_size: int
    pinned_blocks: int
    recent: int
    grows: bool
    chunked: bool = False

    def first_recent(self, computed: int) -> int:
        """f, the first recent block, of a request with `computed` tokens in the cache."""
        return max(self.pinned_blocks, (computed - self.recent) // self.block_size)

    def held_blocks(self, tokens: int, prompt: int) -> int:
        """Blocks of a request of `tokens` tokens, the last of them being computed, after prefill.

        The scheduler frees a step late, so one more may be seen where f has just moved.
        """
        total = -(-tokens // self.block_size)
        end = prompt if self.grows else tokens - 1
        return total - (self.first_recent(end) - self.pinned_blocks)

    def most_blocks_read_chunked(self, chunk: int) -> int:
        """Blocks of a request while its prompt is read in chunks of at most `chunk` tokens.

        What the last chunk has pushed out is freed a step late, when the next one has its blocks:
        pinned blocks, and recent + 2 chunks in tokens, which begin anywhere in a block.
        """
        return self.pinned_blocks + -(-(self.recent + 2 * chunk) // self.block_size) + 1


class RowState:
    """Where each request's recent blocks begin, by slot: what a builder remembers between steps."""

    def __init__(self, layout: Layout, slots: int) -> None:
        self.layout = layout
        self.recent_from = np.zeros(slots, dtype=np.int64)  # 0: it still holds everything
        self._complete = np.zeros(slots, dtype=np.bool_)  # the prompt has been read, and cut

    def advance(
        self, slots: Ints, computed: Ints, prefilling: NDArray[np.bool_]
    ) -> tuple[Ints, Ints]:
        """(f before, f now), each [B], of the step's rows; before < now: blocks between must go.

        slots: distinct rows of the state; computed: tokens in the cache before the step;
        prefilling: whether the prompt was incomplete then, [B].
        """
        pinned = self.layout.pinned_blocks
        # The prompt of a session grows: it is incomplete again when most of it has gone.
        fresh, complete = computed == 0, self._complete[slots]
        whole = fresh if self.layout.chunked else prefilling & (fresh | ~complete)
        before = np.where(whole, pinned, np.maximum(self.recent_from[slots], pinned))
        now = np.maximum(before, (computed - self.layout.recent) // self.layout.block_size)
        if self.layout.grows:
            now = np.where(complete & ~fresh, before, now)
        now = np.where(whole, pinned, now)
        self.recent_from[slots] = np.where(whole, 0, now)
        self._complete[slots] = ~prefilling | (complete & ~fresh)
        return before, now


class Slots:
    """Numbers for requests that are known only by the first block of theirs, at most `count`.

    A block belongs to one request at a time. New requests are admitted only in a step in which all
    running ones are scheduled, so a key that is absent then belongs to a request that is gone, or
    to a session that waits for input: the oldest ones lose their slots.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count))[::-1]
        self._slot: dict[int, int] = {}  # in order of last use

    def of(self, keys: list[int], computed: list[int]) -> Ints:
        """The slot of each key, int64 [B]; computed: tokens that its request has in the cache.

        Raises ValueError for more keys than slots, and for a request that has lost its slot.
        """
        for key, cached in zip(keys, computed, strict=True):
            if key in self._slot:
                self._slot[key] = self._slot.pop(key)
            elif key and cached:  # 0: vLLM's null block, in warm-ups
                raise ValueError(
                    f"expected a session to go on before {len(self._slot)} other requests have "
                    f"come, got one of {cached} tokens whose state is gone: raise max_num_seqs"
                )
        wanted = set(keys)
        for key in keys:
            if key not in self._slot:
                self._slot[key] = self._free.pop() if self._free else self._oldest(wanted)
        return np.array([self._slot[key] for key in keys], dtype=np.int64)

    def _oldest(self, wanted: set[int]) -> int:
        for key in self._slot:
            if key not in wanted:
                return self._slot.pop(key)
        raise ValueError(
            f"expected at most {len(self._slot)} requests in a step, got {len(wanted)}"
        )
