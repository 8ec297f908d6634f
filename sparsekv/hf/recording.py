"""Prompts read once and kept by any policy.

A prompt is attended densely, whoever evicts afterwards. So what its attention layers see, q, k, v
and the log-sum-exp, is recorded in one forward; `replay` hands it to a cache of any policy and
budget, which keeps what it would have kept had the model run into it. No layer of the model runs
again, and nothing is attended twice.

`extend` reads further tokens behind a recorded prompt, for many continuations of it: what comes out
is a recording of the longer prompts in one piece.

Not for policies that change a prompt while it is read: those with `prunes` or a `prefill_block`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparsekv.cache.pages import upload
from sparsekv.device import device_of
from sparsekv.headwise import Scores
from sparsekv.hf.attending import Attend, AttendingCache
from sparsekv.hf.cache import SparseCache
from sparsekv.hf.compat import cache_key
from sparsekv.kernels.prefill import prefill_attention
from sparsekv.policies import Policy
from sparsekv.prompt import attend_prompt, keep_prompt
from sparsekv.step import Part


@dataclass(frozen=True)
class LayerInputs:
    """What one layer's attention saw: q [B, HQ, T, D], k and v [B, HK, T, D], lse [HQ, B * T]."""

    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    scores: Scores


@dataclass(frozen=True)
class Recording:
    """Left-padded prompts of `lengths` int [B] tokens in T columns, by layer."""

    lengths: np.ndarray
    layers: tuple[LayerInputs, ...]

    @property
    def columns(self) -> int:
        """T."""
        return self.layers[0].q.shape[2]

    def rows(self, start: int, stop: int) -> Recording:
        """The prompts start .. stop - 1; tensors are views."""
        width = self.columns
        span = slice(start * width, stop * width)
        layers = tuple(
            LayerInputs(x.q[start:stop], x.k[start:stop], x.v[start:stop], x.lse[:, span], x.scores)
            for x in self.layers
        )
        return Recording(self.lengths[start:stop], layers)


def replayable(policy: Policy) -> bool:
    """Whether a prompt is the same under this policy as under any other."""
    return not policy.prunes and policy.prefill_block is None


@torch.no_grad()
def record(
    model: PreTrainedModel, input_ids: Tensor, positions: Tensor, lengths: np.ndarray
) -> Recording:
    """Read left-padded prompts: input_ids and positions int64 [B, T], `lengths` int [B] tokens.

    The model must be patched, with whatever policy.
    """
    part = Part("prefill", 0, input_ids.shape[1], lengths, lengths)
    found: list[LayerInputs] = []

    def attend(
        layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores, window: int | None
    ) -> Tensor:
        q, k, v = (_by_token(x) for x in (q, k, v))
        out, lse = attend_prompt(part, q, k, v, scores, window)
        found.append(LayerInputs(q, k, v, lse, scores))
        return out

    _read(model, input_ids, positions, attend)
    return Recording(lengths, tuple(found))


@torch.no_grad()
def extend(
    model: PreTrainedModel,
    recording: Recording,
    places: Sequence[int],
    input_ids: Tensor,
    positions: Tensor,
    lengths: np.ndarray,
) -> Recording:
    """Row r of the result is prompt places[r] followed by row r of the left-padded new tokens.

    input_ids int64 [R, N] and their positions in the longer prompt; lengths int [R], their real
    tokens.
    """
    join = _Join(recording, np.asarray(places), lengths, input_ids.shape[1])
    found: list[LayerInputs] = []

    def attend(
        layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores, window: int | None
    ) -> Tensor:
        out, inputs = join.attend(recording.layers[layer], q, k, v, scores, window)
        found.append(inputs)
        return out

    _read(model, input_ids, positions, attend)
    return Recording(join.total, tuple(found))


@torch.no_grad()
def replay(recording: Recording, cache: SparseCache) -> None:
    """Put recorded prompts into an empty cache, which keeps of them what its policy keeps.

    Raises:
        ValueError: a policy whose prompts are not like those of others, or what the policy refuses.
    """
    state = cache.state
    if not replayable(state.policy):
        raise ValueError(f"expected a replayable policy, got {state.policy.name!r}")
    columns = np.arange(recording.columns)
    real = columns >= (recording.columns - recording.lengths)[:, None]
    mask = None if real.all() else torch.from_numpy(real)  # on the host, where it is wanted
    for layer, x in enumerate(recording.layers):
        with device_of(x.q):
            (part,) = state.begin(layer, x.q, x.k, mask)
            keep_prompt(state, layer, part, x.q, x.k, x.v, x.scores, x.lse)


class _Join:
    """Old and new tokens as one prompt, per row: [padding, old tokens, new tokens]."""

    def __init__(
        self, recording: Recording, places: np.ndarray, lengths: np.ndarray, new: int
    ) -> None:
        self.places, self.lengths = places, lengths
        before, old = recording.lengths[places], recording.columns
        total = before + lengths
        self.total, self.columns, self.new = total, int(total.max()), new
        rank = np.arange(self.columns) - (self.columns - total)[:, None]  # < 0 in padding
        from_old = (places * old + old - before)[:, None] + rank
        first_new = len(recording.lengths) * old + np.arange(len(places)) * new + new - lengths
        from_new = first_new[:, None] + rank - before[:, None]
        flat = np.where(rank < before[:, None], from_old, from_new)
        # Padding may hold anything that is finite.
        self.index = np.where(rank < 0, 0, flat).astype(np.int64).ravel()
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """index int64 [R * columns] and, int32, the four lengths arguments of the attention."""
        if device not in self._on:
            rows = np.arange(len(self.places) + 1)
            cu_q, cu_k = rows * self.new, rows * self.columns
            cu_q[:-1] += self.new - self.lengths
            cu_k[:-1] += self.columns - self.total
            flat = np.concatenate([cu_q, cu_k, self.lengths, self.total]).astype(np.int32)
            self._on[device] = upload(self.index, device), upload(flat, device)
        return self._on[device]

    def attend(
        self, old: LayerInputs, q: Tensor, k: Tensor, v: Tensor, scores: Scores, window: int | None
    ) -> tuple[Tensor, LayerInputs]:
        """The new tokens attend the whole prompt: out [R, N, HQ, D]."""
        index, lengths = self.on(q.device)
        rows = len(self.places)
        cu_q, cu_k, used_q, used_k = lengths.split([rows + 1, rows + 1, rows, rows])
        new_q, new_k, new_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        flat_k, flat_v = self._joined(old.k, new_k, index), self._joined(old.v, new_v, index)
        out, lse = prefill_attention(
            new_q, flat_k, flat_v, cu_q, cu_k, self.new, self.columns,
            softmax_scale=scores.softmax_scale, softcap=scores.softcap, window=window,
            sinks=scores.sinks, seqused_q=used_q, seqused_k=used_k,
        )  # fmt: skip
        flat_q = self._joined(old.q, new_q, index)
        whole_q, whole_k, whole_v = (
            x.unflatten(0, (rows, self.columns)).transpose(1, 2) for x in (flat_q, flat_k, flat_v)
        )
        every = torch.cat([old.lse, lse], 1).index_select(1, index)
        whole = LayerInputs(whole_q, whole_k, whole_v, every, scores)
        return out.unflatten(0, (rows, self.new)), whole

    @staticmethod
    def _joined(old: Tensor, new: Tensor, index: Tensor) -> Tensor:
        """[C, H, T, D] and [R * N, H, D] -> [R * columns, H, D]."""
        return torch.cat([old.transpose(1, 2).flatten(0, 1), new]).index_select(0, index)


def _by_token(x: Tensor) -> Tensor:
    """The same [B, H, T, D] with all heads of a token side by side, as the kernels read it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _read(model: PreTrainedModel, input_ids: Tensor, positions: Tensor, attend: Attend) -> None:
    """Run the layers of a patched model over tokens int64 [B, T] that attend by `attend`."""
    base: Any = model.base_model
    base(
        input_ids=input_ids, position_ids=positions, use_cache=True,
        **{cache_key(base): AttendingCache(model, attend)},
    )  # fmt: skip
