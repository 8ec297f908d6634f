"""Everything one sparse cache knows: page stores, limits, rows seen, and what rollback needs.

Policy-aware but framework-free: a Hugging Face cache, an engine or a test drives it through
`begin` and `sparsekv.attention.attend`. Columns count padding. Positions do not: a token's position
is its index among the real tokens of its row, so that padding, wherever it stands, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekv.cache.paged import PagedKVCache, Snapshot
from sparsekv.cache.pages import PagePool, upload
from sparsekv.headwise import Scores
from sparsekv.kernels._quant import check_kv_dtype
from sparsekv.moments import QueryMoments
from sparsekv.parts import ModelParts
from sparsekv.plan import EVICTING, LayerSpec, Limits, make_limits
from sparsekv.policies import Full
from sparsekv.policies.base import ModelShape, Policy
from sparsekv.policies.budgets import resolve_budget
from sparsekv.ring import QueryRing
from sparsekv.rope import SinkShift
from sparsekv.step import Part, RowTensors, in_blocks, real_lengths


class SparseState:
    """The state behind one cache.

    Args:
        policy, budget: see `sparsekv.patch`.
        layers: one `LayerSpec` per attention layer, in order.
        page_size: 16, 32 or 64.
        sink_shift: how to rotate keys, for policies that re-index positions.
        kv_dtype: None, or how K and V are quantised, see `sparsekv.patch`.
        defer_eviction: keep a prompt that comes in several forwards whole until its last one, which
            then keeps what a single forward would have kept.
        parts: what the policy's features need of the model.

    Attributes:
        deferred: whether the forward that runs leaves eviction to a later one.
        pruning: what the prompt leaves in each layer under a policy that prunes, see
            `sparsekv.pruning`.
        passed: whether the extra passes of the policy have run over the prompt.
        tokens: int [B] real tokens of each row so far.
        prompt_lengths: int [B] what `tokens` was when the last prompt ended.
        gaps: (before, pads) of each forward with padding: row b had pads[b] columns of padding
            before its token at position before[b].
        rings: the last queries of layers that compress between decode steps, see `sparsekv.ring`.
        capturing: whether the step that runs is being captured: what it does is done again later.
        steady, held_steps: row tensors of decode steps with fixed shapes, and for how many more
            steps pages are found, see `sparsekv.steady`.
        max_columns: columns that a generation may reach, or None if nobody said.
        draft_start: column from which tokens of a recorded forward are drafts (an assistant's last
            prompt token, too), or None: what fills an empty cache is prompt, the rest are drafts.
        chunked_until: column up to which a prompt comes in several forwards; one of a single token
            is then still prompt. Otherwise a single token onto a cache is a decode step.
        keep_queries: keep the last queries of a prefill, and the moments of all of them where the
            policy asks for these, until the first decode step, so that a further chunk can be
            scored by a full observation window and the whole prompt. After a decode step they
            start anew: a later turn is scored by its own queries.
    """

    def __init__(
        self,
        policy: Policy,
        budget: int | float,
        layers: Sequence[LayerSpec],
        *,
        page_size: int = 16,
        sink_shift: SinkShift | None = None,
        kv_dtype: str | None = None,
        defer_eviction: bool = False,
        parts: ModelParts | None = None,
    ) -> None:
        check_kv_dtype(kv_dtype)
        self.kv_dtype = kv_dtype
        self.policy, self.budget = policy, budget
        self.layers, self.page_size = list(layers), page_size
        full = (i for i, spec in enumerate(self.layers) if spec.window is None)
        self.ordinal = {layer: i for i, layer in enumerate(full)}
        self.sink_shift, self.defer_eviction = sink_shift, defer_eviction
        self.parts = parts or ModelParts()
        self.draft_start: int | None = None
        self.max_columns: int | None = None
        self.chunked_until = 0
        self.keep_queries = True
        self.recording = False
        self.reset()

    def reset(self) -> None:
        """Forget every token and give all memory back."""
        self.seen = [0] * len(self.layers)
        self.tokens = np.zeros(0, dtype=np.int64)
        self.gaps: list[tuple[np.ndarray, np.ndarray]] = []
        self.limits: Limits | None = None
        self.shape: ModelShape | None = None
        self.prompt_lengths = self.tokens
        self._prompt_lengths: dict[torch.device, Tensor] = {}
        self.queries: dict[int, tuple[Tensor, Tensor]] = {}
        self.moments: dict[int, dict[tuple, QueryMoments]] = {}
        self.true_sinks: dict[int, Tensor] = {}
        self.snapshots: dict[int, Snapshot] = {}
        self.queries_before: dict[int, tuple[Tensor, Tensor]] = {}
        self.moments_before: dict[int, dict[tuple, QueryMoments]] = {}
        self.rings: dict[int, QueryRing] = {}
        self.rings_before: dict[int, QueryRing] = {}
        self.log: dict[int, list[tuple[Part, Tensor, Tensor, Tensor, Scores]]] = {}
        self.steady: dict[torch.device, RowTensors] | None = None
        self.held_steps = 0
        self.deferred = self.capturing = self.passed = False
        self.pruning: Any = None
        self._stores: dict[int, tuple[PagedKVCache, int]] = {}
        self._parts: list[Part] = []
        self._start = -1

    # ------------------------------------------------------------------ stores

    def store(self, layer: int) -> tuple[PagedKVCache, int]:
        """The page store of a layer and the layer's index in it."""
        return self._stores[layer]

    @property
    def stores(self) -> list[PagedKVCache]:
        """All stores, one per device."""
        return list({id(store): store for store, _ in self._stores.values()}.values())

    def members(self, store: PagedKVCache) -> np.ndarray:
        """The layers of a store, in its order: int [l]."""
        return np.array([i for i, (other, _) in self._stores.items() if other is store])

    def _open_store(self, layer: int, k: Tensor) -> None:
        """Create the store of all layers that are expected on the device of `layer`."""
        expected = self.layers[layer].device
        members = [
            i
            for i, spec in enumerate(self.layers)
            if spec.device == expected and i not in self._stores
        ]
        pool = PagePool(
            k.device, k.dtype, k.shape[-1], self.page_size, self.kv_dtype,
            bounds=self.policy.selects_pages,
        )  # fmt: skip
        store = PagedKVCache(pool, len(members), k.shape[0], k.shape[1])
        self._stores |= {member: (store, i) for i, member in enumerate(members)}

    # ------------------------------------------------------------------ forwards

    def begin(self, layer: int, q: Tensor, k: Tensor, mask: Tensor | None) -> list[Part]:
        """The parts of the forward that `layer` is about to run; planned by its first layer.

        q [B, HQ, T, D], k [B, HK, T, D]; mask: padding mask over all columns, or None.

        Raises:
            ValueError: another batch size than before, a mask that is no left padding, or a cache
                that a failed forward left half-written.
        """
        batch, _, tokens, _ = k.shape
        if not self.tokens.size:
            self.tokens = np.zeros(batch, dtype=np.int64)
        if batch != len(self.tokens):
            raise ValueError(f"expected a batch of {len(self.tokens)} rows, got {batch}")
        if self.seen[layer] != self._start:
            self._plan_forward(layer, q, k, mask)
        elif self.policy.prunes and self._parts[0].kind == "prefill":
            tokens = self._parts[0].tokens  # later layers see fewer
        elif tokens != sum(part.tokens for part in self._parts):
            raise ValueError("expected the layers of one forward to see the same tokens")
        if layer not in self._stores:
            self._open_store(layer, k)
            self._prepare(layer)
        store, _ = self._stores[layer]
        if (k.shape[1], k.shape[3]) != (store.lens.shape[2], store.pool.head_dim):
            raise ValueError(
                f"expected {store.lens.shape[2]} KV heads of {store.pool.head_dim} in every layer, "
                f"got {k.shape[1]} of {k.shape[3]} in layer {layer}"
            )
        self.seen[layer] += tokens
        return self._parts

    def _plan_forward(self, layer: int, q: Tensor, k: Tensor, mask: Tensor | None) -> None:
        _, _, tokens, head_dim = k.shape
        start = self.seen[layer]
        if len(set(self.seen)) != 1:
            raise ValueError(
                "expected a whole cache, got one that a failed forward left half-written"
            )
        lengths = real_lengths(mask, start, self.tokens, tokens)
        if not self.held_steps:
            self.steady = None
        parts = self._split(start, tokens, lengths)
        self._expect_passes(parts)
        if parts[0].kind != "decode":
            self.held_steps = 0
            self.prompt_lengths, self._prompt_lengths = parts[0].seen, {}
            shape = ModelShape(len(self.ordinal), q.shape[1], k.shape[1], head_dim)
            self.shape = shape
            self.deferred = self.defer_eviction and start + tokens < self.chunked_until
            policy = Full() if self.deferred else self.policy
            limits = make_limits(policy, self.budget, self.layers, shape, parts[0].seen)
            self._keep_sinks(limits)
            self.limits = limits
            block = self.policy.prefill_block
            evicts = (limits.keep[[*self.ordinal]] < parts[0].seen[:, None]).any()
            if block is not None and not self.deferred and evicts:
                parts = in_blocks(parts[0], block) + parts[1:]
        if (lengths < tokens).any():
            self.gaps.append((self.tokens, tokens - lengths))
        self._start, self._parts = start, parts
        self.tokens = self.tokens + lengths
        if self.steady is not None and self.held_steps:
            self.held_steps -= 1
            for rows in self.steady.values():
                rows.before.add_(1)
            return
        for member in {id(store): i for i, (store, _) in self._stores.items()}.values():
            self._prepare(member)

    def _expect_passes(self, parts: list[Part]) -> None:
        """A prompt that waits for extra passes must get them before the first decode step."""
        if not self.policy.extra_passes or self.passed or parts[-1].kind != "decode":
            return
        if any(n > resolve_budget(self.budget, int(n)) for n in self.tokens if n):
            raise ValueError(
                f"expected sparsekv.compress(model, cache, input_ids) before the first decode step "
                f"under policy {self.policy.name!r}, got a cache of {self.tokens.tolist()} tokens "
                f"that is still whole"
            )
        self.passed = True

    def _keep_sinks(self, limits: Limits) -> None:
        """A row that has evicted gets no more sinks than before: the next ones are gone."""
        for layer, (store, index) in self._stores.items():
            assert self.limits is not None
            evicted = (store.lens[index] < self.tokens[:, None]).any(-1, keepdims=True)
            fewer = np.minimum(limits.sinks[layer], self.limits.sinks[layer])
            limits.sinks[layer] = np.where(evicted, fewer, limits.sinks[layer])

    def _split(self, start: int, tokens: int, lengths: np.ndarray) -> list[Part]:
        """A forward as its prompt part, if any, and one decode part per draft or decoded token."""
        prompt = self._prompt_columns(start, tokens)
        if prompt == 1 and self.tokens.any() and start >= self.chunked_until:
            prompt = 0
        drafts = tokens - prompt
        if drafts and (lengths < drafts).any():
            raise ValueError("expected a real token in every row of a decode step, got padding")
        if drafts and (self.tokens + lengths == drafts).any():
            raise ValueError("expected a prompt of at least 1 token in every row, got an empty one")
        parts = []
        if prompt:
            kind = "chunk" if self.tokens.any() else "prefill"
            real = lengths - drafts
            parts.append(Part(kind, start, prompt, real, self.tokens + real))
        ones = np.ones(len(lengths), dtype=np.int64)
        for i in range(drafts):
            seen = self.tokens + lengths - drafts + i + 1
            parts.append(Part("decode", start + prompt + i, 1, ones, seen, self.steady or {}))
        return parts

    def _prompt_columns(self, start: int, tokens: int) -> int:
        """How many leading columns of this forward are prompt; the others are decode steps."""
        if not self.recording:
            return tokens
        if self.draft_start is not None:
            return min(max(self.draft_start - start, 0), tokens)
        return 0 if start else tokens

    def columns(self, row: int, positions: np.ndarray) -> np.ndarray:
        """The columns of tokens of a row, given their positions."""
        gaps = (np.where(positions >= before[row], pads[row], 0) for before, pads in self.gaps)
        return positions + sum(gaps)

    def _prepare(self, layer: int) -> None:
        """Find pages for the forward, for all layers of a store at once."""
        store, _ = self._stores[layer]
        members, part = self.members(store), self._parts[0]
        assert self.limits is not None
        if part.kind == "prefill":
            keep = np.minimum(self.limits.keep[members], part.lengths[:, None])
            if self.policy.ragged:  # who gets which page is known when a layer has selected
                store.pool.reserve(int((-(-keep // store.pool.page_size)).sum()))
            else:
                store.ensure(np.arange(len(members)), keep, self.rewrites[members])
        elif part.kind == "decode" and not self.recording:
            room = store.lens < self.limits.budget[members]
            grows = room | (self.limit_modes[members] != "replace")[:, None, None]
            store.ensure(np.arange(len(members)), grows.astype(np.int32), self.rewrites[members])

    def prompt_lengths_on(self, device: torch.device) -> Tensor:
        """int32 [B] tokens of each row when its last prompt ended, on `device`."""
        if device not in self._prompt_lengths:
            self._prompt_lengths[device] = upload(self.prompt_lengths.astype(np.int32), device)
        return self._prompt_lengths[device]

    @property
    def limit_modes(self) -> np.ndarray:
        """str [L]: the decode mode of every layer, see `LayerPlan`."""
        assert self.limits is not None
        return np.array(self.limits.mode)

    @property
    def rewrites(self) -> np.ndarray:
        """bool [L]: layers where a decode step writes slots that exist (KV or scores)."""
        assert self.limits is not None
        return np.array(
            [
                mode in EVICTING or (self.policy.stateful and layer in self.ordinal)
                for layer, mode in enumerate(self.limits.mode)
            ]
        )

    # ------------------------------------------------------------------ rows and rollback

    def select_rows(self, rows: np.ndarray) -> None:
        """Make row i a fork of old row rows[i]: beam search, batch repeat, batch select.

        Raises:
            ValueError: a round of drafts is open; its snapshots hold the rows as they were.
        """
        if not self.tokens.size:
            return
        if self.snapshots:
            raise ValueError("expected crop() before rows change, got an open round of drafts")
        self.held_steps = 0
        for store in self.stores:
            store.select_rows(rows)
        self.tokens = self.tokens[rows]
        self.prompt_lengths, self._prompt_lengths = self.prompt_lengths[rows], {}
        self.gaps = [(before[rows], pads[rows]) for before, pads in self.gaps]
        self.limits = self.limits.select_rows(rows) if self.limits else None

        def pick(x: Tensor) -> Tensor:
            return x[torch.from_numpy(rows).to(x.device)]

        self.queries = {i: (pick(q), pick(p)) for i, (q, p) in self.queries.items()}
        self.moments = {
            i: {
                key: one.select_rows(torch.from_numpy(rows).to(one.mean.device))
                for key, one in kinds.items()
            }
            for i, kinds in self.moments.items()
        }
        self.true_sinks = {i: pick(k) for i, k in self.true_sinks.items()}
        self.rings = {
            i: ring.select_rows(torch.from_numpy(rows).to(ring.q.device))
            for i, ring in self.rings.items()
        }

    def open_round(self, layer: int) -> None:
        """Snapshot a layer before its first draft token since the last `settle`."""
        if layer not in self.snapshots:
            store, index = self._stores[layer]
            self.snapshots[layer] = store.snapshot(index)
            if layer in self.queries:
                self.queries_before[layer] = self.queries[layer]
            if layer in self.moments:
                self.moments_before[layer] = self.moments[layer]
            if layer in self.rings:
                self.rings_before[layer] = self.rings[layer].clone()
            self.log[layer] = []

    def rewind(self, tokens: int) -> dict[int, list]:
        """Back to the start of the round; returns what each layer must replay to lose `tokens`."""
        replay = {layer: log[: len(log) - tokens] for layer, log in self.log.items()}
        for layer, snapshot in self.snapshots.items():
            store, _ = self._stores[layer]
            store.restore(snapshot)
            self.seen[layer] -= tokens
            self.log[layer] = []
        self.snapshots = {}
        self.queries |= self.queries_before
        self.moments |= self.moments_before
        self.rings |= self.rings_before
        self.tokens = self.tokens - tokens
        self.forget_forward()
        return replay

    def count_step(self) -> None:
        """Count a decode step of every layer and row that Python did not run."""
        self._start = self.seen[0]
        self.held_steps -= 1
        self.seen = [columns + 1 for columns in self.seen]
        self.tokens = self.tokens + 1

    def forget_forward(self) -> None:
        """The next layer to begin plans its forward anew."""
        self._start = -1

    def settle(self) -> None:
        """Accept every draft token of the round."""
        for layer, snapshot in self.snapshots.items():
            self._stores[layer][0].drop(snapshot)
        self.snapshots, self.log = {}, {}
        self.queries_before, self.moments_before, self.rings_before = {}, {}, {}
