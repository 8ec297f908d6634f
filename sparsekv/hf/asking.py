"""Many questions to what a cache holds, in one forward that stores nothing.

The tokens of each row attend what the cache keeps of one of its rows, then themselves, causally: as
a chunk fed to a fork of that row, except that nothing is forked, appended or evicted. What is kept
is attended once for all rows that ask about it, as one sequence of queries:

    out = out_own + share (out_kept - out_own)      share = sigmoid(lse_kept - lse_own)

Tokens may be remembered, so that further rows can go on from them: what the questions of a context
begin with, and the choices of a question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparsekv.cache.pages import upload
from sparsekv.headwise import Scores
from sparsekv.hf.attending import AttendingCache
from sparsekv.hf.cache import SparseCache
from sparsekv.hf.compat import cache_key
from sparsekv.kernels.prefill import prefill_attention
from sparsekv.state import SparseState


def askable(cache: SparseCache) -> bool:
    """Whether a chunk fed to this cache attends just what is kept and itself, as it is: the policy
    neither moves what is kept, nor drops any while a chunk is read, and nothing is quantised."""
    policy = cache.state.policy
    moves = policy.prunes or policy.rerotates_sinks or policy.prefill_block is not None
    return not moves and cache.state.kv_dtype is None


@dataclass(frozen=True)
class Kept:
    """Keys of one layer that several rows attend: k and v [N, HK, S, D], the used [N, HK] of them
    from start [N] on, at positions int32 [N, HK, S] (None where no window asks).

    even: heads of a list hold the same number, and at the same positions where a window asks.
    """

    k: Tensor
    v: Tensor
    start: Tensor | None
    used: Tensor
    positions: Tensor | None
    even: bool


@dataclass
class Remembered:
    """The keys of rows that were fed. before, lengths: int [N] tokens before them, and of them.

    places: the row of the cache, or of what was remembered before, that each goes on from.
    """

    places: np.ndarray
    before: np.ndarray
    lengths: np.ndarray
    keys: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def kept(self, layer: int, window: int | None) -> Kept:
        """Of one layer."""
        k, v = self.keys[layer]
        rows, heads, width, _ = k.shape
        start = upload((width - self.lengths).astype(np.int64), k.device)
        used = upload(self.lengths.astype(np.int32), k.device)[:, None].expand(-1, heads)
        if window is None:
            return Kept(k, v, start, used, None, True)
        first = upload((self.before + self.lengths - width).astype(np.int32), k.device)
        at = first[:, None] + torch.arange(width, dtype=torch.int32, device=k.device)
        positions = at[:, None].expand(rows, heads, width)
        return Kept(k, v, start, used, positions, True)


class Asking:
    """Questions to an `askable` cache; the model must be patched."""

    def __init__(self, model: PreTrainedModel, cache: SparseCache) -> None:
        self.model, self.state = model, cache.state
        self.memories: list[Remembered] = []

    @torch.no_grad()
    def ask(
        self,
        places: Sequence[int],
        input_ids: Tensor,
        lengths: np.ndarray,
        keep: int,
        *,
        remember: bool = False,
    ) -> Tensor:
        """Logits [R, keep, V] of the last columns of left-padded rows, int64 [R, T].

        places: ascending; the cache's row that each row asks about, or, once rows were remembered,
        which of the last of these it goes on from. lengths: int [R], real tokens.
        """
        which = np.asarray(places)
        chain, before = [which], self.state.tokens
        for memory in reversed(self.memories):
            chain.insert(0, memory.places[chain[0]])
        if self.memories:
            before = self.memories[-1].before + self.memories[-1].lengths
        note = Remembered(which, before[which], lengths)
        forward = _Forward(self.state, self.memories, chain, note, input_ids.shape[1], remember)
        rank = np.arange(input_ids.shape[1]) - (input_ids.shape[1] - lengths)[:, None]
        positions = before[which][:, None] + rank.clip(0)
        cache = AttendingCache(self.model, forward.attend)
        logits = self.model(
            input_ids=input_ids, use_cache=True, logits_to_keep=keep,
            position_ids=upload(positions.astype(np.int64), input_ids.device),
            **{cache_key(self.model): cache},
        ).logits  # fmt: skip
        if remember:
            self.memories.append(note)
        return logits


class _Forward:
    """One forward of the rows `note`. chain: which row of the cache, and then of each of the
    memories, each row goes on from."""

    def __init__(
        self,
        state: SparseState,
        memories: Sequence[Remembered],
        chain: list[np.ndarray],
        note: Remembered,
        columns: int,
        remember: bool,
    ) -> None:
        self.state, self.memories, self.chain = state, list(memories), chain
        self.note, self.columns, self.remember = note, columns, remember
        self._on: dict[Any, Tensor] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores, window: int | None
    ) -> Tensor:
        """[R, T, HQ, D]: own tokens first, then what is kept of each kind."""
        if self.remember:
            self.note.keys[layer] = k, v
        how = {"softmax_scale": scores.softmax_scale, "softcap": scores.softcap, "window": window}
        out, lse = self._own(q, k, v, how, scores.sinks)
        kinds = [_cached(self.state, layer, window)]
        kinds += [memory.kept(layer, window) for memory in self.memories]
        for places, kept in zip(self.chain, kinds, strict=True):
            other, other_lse = self._kept(q, kept, places, how)
            # Padding sees nothing of its own.
            share = torch.sigmoid(other_lse - lse).nan_to_num(0.0)
            out = out + share.transpose(1, 2)[..., None] * (other.float() - out)
            lse = torch.logaddexp(lse, other_lse)
        return out.to(q.dtype)

    def _own(
        self, q: Tensor, k: Tensor, v: Tensor, how: dict[str, Any], sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """out fp32 [R, T, HQ, D] and lse [R, HQ, T] of the rows' own tokens, with sink logits."""
        rows, heads, width, _ = q.shape
        cu = np.append(np.arange(rows) * width + width - self.note.lengths, rows * width)
        lengths = np.concatenate([cu, self.note.lengths])
        both = self._once(("own", q.device), lengths, q.device)
        cu_seqlens, used = both[: rows + 1], both[rows + 1 :]
        flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        out, lse = prefill_attention(
            flat_q, flat_k, flat_v, cu_seqlens, cu_seqlens, width, width,
            seqused_q=used, seqused_k=used, sinks=sinks, **how,
        )  # fmt: skip
        lse = lse.view(heads, rows, width).transpose(0, 1)
        return out.unflatten(0, (rows, width)).float(), lse

    def _kept(
        self, q: Tensor, kept: Kept, places: np.ndarray, how: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """out [R, T, HQ, D] and lse [R, HQ, T]. The queries of all rows of one of the N key lists
        are one sequence, or one for each KV head, if heads hold different numbers of keys."""
        rows, _, width, dim = q.shape
        lists, heads, slots, _ = kept.k.shape
        parts = 1 if kept.even else heads
        flat_q = q.unflatten(1, (parts, -1)).permute(1, 0, 3, 2, 4).flatten(0, 2)
        flat_k, flat_v = (
            x.unflatten(1, (parts, -1)).transpose(2, 3).flatten(0, 2) for x in (kept.k, kept.v)
        )
        ends = np.searchsorted(places, np.arange(lists + 1)) * width
        cu = (np.arange(parts)[:, None] * rows * width + ends[:-1]).ravel()
        cu = np.append(cu, parts * rows * width)
        cu_q = self._once(("cu", q.device, lists, parts), cu, q.device)
        first = torch.arange(lists * parts, dtype=torch.int32, device=q.device) * slots
        first = first.view(lists, parts)
        if kept.start is not None:
            first = first + kept.start[:, None].int()
        cu_k = torch.nn.functional.pad(first.T.flatten(), (0, 1), value=lists * parts * slots)
        more = how | {"causal": False}
        if kept.positions is not None:
            more = how | {
                "positions_q": self._positions(q.device).repeat(parts),
                "positions_k": kept.positions[:, :parts].flatten().contiguous(),
            }
        out, lse = prefill_attention(
            flat_q, flat_k, flat_v, cu_q, cu_k, int(np.diff(ends).max()), slots,
            seqused_k=kept.used[:, :parts].T.flatten().contiguous(), **more,
        )  # fmt: skip
        lse = lse.view(-1, parts, rows, width).permute(2, 1, 0, 3).flatten(1, 2)
        out = out.view(parts, rows, width, -1, dim).permute(1, 2, 0, 3, 4).flatten(2, 3)
        return out, lse

    def _positions(self, device: torch.device) -> Tensor:
        """int32 [R * T]; padding sits at -1, where it sees nothing."""
        rank = np.arange(self.columns) - (self.columns - self.note.lengths)[:, None]
        at = np.where(rank < 0, -1, self.note.before[:, None] + rank).ravel()
        return self._once(("positions", device), at, device)

    def _once(self, key: Any, host: np.ndarray, device: torch.device) -> Tensor:
        if key not in self._on:
            self._on[key] = upload(host.astype(np.int32), device)
        return self._on[key]


def _cached(state: SparseState, layer: int, window: int | None) -> Kept:
    """What the cache holds in a layer, by slot."""
    store, local = state.store(layer)
    slots, lens = int(store.lens[local].max()), store.lens[local]
    order = torch.arange(slots, device=store.seqlens.device).expand(*lens.shape, -1)
    positions = None
    if window is not None:
        positions = store.view(local, "positions")[..., :slots].contiguous()
    # Slots of a window's tokens may differ between heads.
    even = window is None and bool((lens == lens[:, :1]).all())
    return Kept(*store.gather(local, order), None, store.seqlens[local], positions, even)
