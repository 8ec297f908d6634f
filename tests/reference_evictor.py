"""An independent, slow statement of what every policy does to a model: the truth of the tests.

The stock DynamicCache keeps every token. One dense attention function hides exactly the evicted
(layer, KV head, token) triples behind an explicit mask, in float64, and the policies are written
out again from their formulas on explicit probability matrices: no kernel, no page, no batch.
Nothing of sparsekv is used but the hyper-parameters that a policy object carries.

    prefill   attend densely, then cut every head to its plan
    chunk     T > 1 tokens onto a cache: attend all kept and causally themselves, then cut
    decode    "replace": drop the victim, then attend;  "evict": attend, then drop it;  or grow

kv_dtype: a prompt is attended as it is; every later step attends all keys and values rounded to
what the format can hold, each vector by itself, so that it does not matter when that happens.

One row, no padding.
"""

from __future__ import annotations

import copy
import inspect
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

NAME = "reference"
Head = dict[int, float]  # kept position -> score


@dataclass
class Plan:
    """Slots of a layer, tokens at both ends that never go, and what a decode step does."""

    budget: int | None
    sinks: int = 0
    recent: int = 0
    decode: str = "grow"


class Reference:
    """A copy of `model` under `policy`, fed token by token or in chunks.

    remember: later prefill chunks are also scored by the queries of the chunks before them.
    heads[layer][kv_head] is what is kept.
    """

    def __init__(
        self,
        model: Any,
        policy: Any,
        budget: int | float,
        remember: bool = True,
        kv_dtype: str | None = None,
    ) -> None:
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation(NAME)
        self.policy, self.budget, self.remember = policy, budget, remember
        self.kv_dtype = kv_dtype
        self.reset()

    def reset(self) -> None:
        """Forget every token."""
        config = self.model.config
        self.cache = DynamicCache()
        self.heads: list[list[Head]] = [
            [{} for _ in range(config.num_key_value_heads)] for _ in range(config.num_hidden_layers)
        ]
        self.plans: dict[int, Plan] = {}
        self.queries: dict[int, tuple[Tensor, list[int]]] = {}

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        """Logits [T, V] of the tokens ids [1, T]."""
        parameters = inspect.signature(type(self.model).forward).parameters
        name = "cache" if "cache" in parameters else "past_key_values"
        output = self.model(input_ids=ids, use_cache=True, reference=self, **{name: self.cache})
        return output.logits[0]

    def kept(self) -> list[list[list[int]]]:
        """Kept positions by layer and KV head, ascending."""
        return [[sorted(head) for head in layer] for layer in self.heads]

    def generate(self, ids: Tensor, new: int) -> tuple[list[int], Tensor]:
        """Greedy tokens and their logits [new, V]; the last token is not fed."""
        tokens, logits = [], []
        for _ in range(new):
            logits.append(self.feed(ids)[-1])
            tokens.append(int(logits[-1].argmax()))
            ids = torch.tensor([[tokens[-1]]])
        return tokens, torch.stack(logits)

    # ------------------------------------------------------------------ one layer

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [HQ, T, D] of the new tokens, k and v [HK, N, D] of all tokens ever -> [T, HQ, D]."""
        q, k, v = q.double(), k.double(), v.double()
        tokens, seen = q.shape[1], k.shape[1]
        if self.kv_dtype is not None and seen > tokens:
            k, v = rounded(k, self.kv_dtype), rounded(v, self.kv_dtype)
        new = list(range(seen - tokens, seen))
        decode = tokens == 1 and seen > 1
        heads = self.heads[layer]
        if not decode:
            plan = make_plans(self.policy, self.budget, len(self.heads), seen)[layer]
            if any(len(head) < new[0] for head in heads):  # later sinks are gone already
                plan = replace(plan, sinks=min(plan.sinks, self.plans[layer].sinks))
            self.plans[layer] = plan
        plan = self.plans[layer]
        for head in heads:
            if decode and plan.decode == "replace" and len(head) >= plan.budget:
                del head[self.victim(head, plan, new[-1])]
            head |= dict.fromkeys(new, 0.0)
        probabilities = self.probabilities(layer, q, new, k, scale)
        out = torch.einsum("htn,hnd->thd", probabilities, _repeat(v, q))
        if decode:
            self.queries.pop(layer, None)
            self.observe(layer, "decode", self.votes(probabilities))
            for head in heads:
                if plan.decode == "evict" and len(head) > plan.budget:
                    del head[self.victim(head, plan, new[-1])]
        else:
            self.observe(layer, "prefill", self.window_votes(layer, q, new, k, scale))
            for head in heads:
                self.cut(head, plan)
        return out

    def probabilities(
        self, layer: int, q: Tensor, at: list[int], k: Tensor, scale: float
    ) -> Tensor:
        """Softmax of queries q [HQ, R, D] at positions `at` over what is kept: [HQ, R, N]."""
        heads, position = self.heads[layer], torch.arange(k.shape[1])
        kept = torch.tensor([[j in head for j in position.tolist()] for head in heads])
        if getattr(self.policy, "positions", "original") == "cache":
            # The published formula: keys rotated by their slot, the query by the last slot.
            slot = kept[0].long().cumsum(0) - 1
            k = self.rotate(self.rotate(k, -position), slot)
            q = self.rotate(self.rotate(q, -torch.tensor(at)), slot[at])
        visible = kept[:, None] & (position <= torch.tensor(at)[:, None])  # [HK, R, N]
        logits = scale * q @ _repeat(k, q).transpose(1, 2)
        rows = logits.masked_fill(~_repeat(visible, q), -math.inf).softmax(-1)
        return rows.nan_to_num(0.0)  # a query that sees no kept key has no vote

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate-half RoPE of x [H, N, D] by positions [N]."""
        half = x.shape[-1] // 2
        theta = self.model.config.rope_parameters["rope_theta"]
        frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = positions[:, None] * frequency
        left, right = x[..., :half], x[..., half:]
        turned = (
            left * angle.cos() - right * angle.sin(),
            right * angle.cos() + left * angle.sin(),
        )
        return torch.cat(turned, -1)

    # ------------------------------------------------------------------ scores

    def votes(self, probabilities: Tensor) -> Tensor:
        """Column sums over query rows, reduced over the group: [HQ, R, N] -> [HK, N]."""
        kv_heads = self.model.config.num_key_value_heads
        sums = probabilities.sum(1).unflatten(0, (kv_heads, -1))
        how = getattr(self.policy, "group", "mean")
        return {"mean": sums.mean(1), "sum": sums.sum(1), "max": sums.amax(1)}[how]

    def window_votes(
        self, layer: int, q: Tensor, at: list[int], k: Tensor, scale: float
    ) -> Tensor | None:
        """Votes of the rows a prefill is scored by: all of them, or the last W seen so far."""
        if self.policy.name in ("full", "streaming"):
            return None
        if self.policy.name != "h2o":
            rows = (
                self.policy.window_rows if self.policy.name == "layersplit" else self.policy.window
            )
            if layer in self.queries:
                q, at = torch.cat([self.queries[layer][0], q], 1), self.queries[layer][1] + at
            q, at = q[:, -rows:], at[-rows:]
            if self.remember:
                self.queries[layer] = (q, at)
        return self.votes(self.probabilities(layer, q, at, k, scale))

    def observe(self, layer: int, phase: str, votes: Tensor | None) -> None:
        """Fold votes [HK, N] into the scores of the layer."""
        name = self.policy.name
        if self.plans[layer].budget is None:
            return
        for h, head in enumerate(self.heads[layer]):
            for j in head:
                if name == "h2o":
                    head[j] += float(votes[h, j])
                elif name == "streaming":
                    head[j] = float(j)
                elif name == "layersplit" and phase == "decode":
                    decay = 1 - 1 / self.policy.window_rows if self.policy.accum == "ema" else 1
                    head[j] = decay * head[j] + float(votes[h, j])
                elif phase == "prefill":
                    head[j] = float(votes[h, j])

    def cut(self, head: Head, plan: Plan) -> None:
        """Keep sinks, recent tokens and the best scores; of equal scores the newer."""
        if plan.budget is None or len(head) <= plan.budget:
            return
        order = sorted(head)
        score = dict(head)
        older = order[: len(order) - plan.recent]
        score |= pooled(self.policy, [head[j] for j in older], older)
        safe = {j for j in order if j < plan.sinks} | set(order[len(order) - plan.recent :])
        others = sorted((j for j in order if j not in safe), key=lambda j: (-score[j], -j))
        for j in others[plan.budget - len(safe) :]:
            del head[j]

    def victim(self, head: Head, plan: Plan, current: int) -> int:
        """Lowest score, of equal scores the oldest, among tokens that may go."""
        free = [j for j in head if plan.sinks <= j <= current - plan.recent]
        return min(free, key=lambda j: (head[j], j))


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any
) -> tuple[Tensor, None]:
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    out = kwargs["reference"].attend(module.layer_idx, query[0], key[0], value[0], scale)
    return out[None].to(query.dtype), None


def _repeat(x: Tensor, q: Tensor) -> Tensor:
    """x [HK, ...] for each of the HQ query heads."""
    return x.repeat_interleave(len(q) // len(x), 0)


def rounded(x: Tensor, kv_dtype: str) -> Tensor:
    """x [..., D] as a cache of that format gives it back: largest value to the format's largest."""
    x = x.float()
    floats = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    if kv_dtype in floats:
        limit = torch.finfo(floats[kv_dtype]).max
    else:
        limit = {"int8": 127.0, "int4": 7.0}[kv_dtype]
    largest = x.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest, limit) / limit
    steps = x / scale
    steps = steps.to(floats[kv_dtype]).float() if kv_dtype in floats else torch.round(steps)
    return (steps * scale).double()


def pooled(policy: Any, values: list[float], positions: list[int]) -> Head:
    """Scores of SnapKV and its kin: max or mean over `kernel` neighbours, zeros beyond the ends."""
    mode = getattr(policy, "pool", "none")
    if mode == "none":
        return dict(zip(positions, values, strict=True))
    reach = policy.kernel // 2
    around = [values[max(i - reach, 0) : i + reach + 1] for i in range(len(values))]
    scores = [max(near) if mode == "max" else sum(near) / policy.kernel for near in around]
    return dict(zip(positions, scores, strict=True))


# ---------------------------------------------------------------------- budgets


def make_plans(policy: Any, budget: int | float, layers: int, tokens: int) -> list[Plan]:
    """What each layer keeps of `tokens` tokens."""
    slots = budget
    if isinstance(budget, float):  # a fraction of the tokens, rounded half up
        slots = max(1, math.floor(Fraction(str(budget)) * tokens + Fraction(1, 2)))
    name = policy.name
    if name == "full":
        return [Plan(None)] * layers
    if name == "streaming":
        sinks = min(policy.sinks, slots - 1)
        return [Plan(slots, sinks, slots - sinks, "replace")] * layers
    if name == "h2o":
        heavy = math.floor(slots * Fraction(str(policy.heavy_fraction)))
        return [Plan(slots, 0, slots - heavy, "evict")] * layers
    if name == "layersplit":
        recent = min(policy.window_rows, slots // 4) if policy.recent is None else policy.recent
        window = Plan(slots, 0, min(recent, slots), "replace")
        return [Plan(None) if layer < policy.full_layers else window for layer in range(layers)]
    counts = [slots] * layers if name == "snapkv" else pyramid(policy, layers, slots, tokens)
    return [Plan(count, 0, min(policy.window, count)) for count in counts]


def pyramid(policy: Any, layers: int, slots: int, tokens: int) -> list[int]:
    """Budgets that fall linearly over depth, as published or exact to the slot."""
    window, free = policy.window, slots - policy.window
    if policy.rounding == "official":
        if layers == 1 or free < 1 or tokens < max(slots, 2 * free):
            return [slots] * layers
        low = free // policy.beta
        high = 2 * free - low
        if high >= tokens - window:
            high, low = tokens - window, 2 * free - (tokens - window)
        return [high - l * ((high - low) // (layers - 1)) + window for l in range(layers)]
    if layers == 1 or free < 1 or tokens <= slots:
        return [slots] * layers
    low = free // policy.beta
    if 2 * free - low > tokens - window:  # the lowest layer keeps all there is
        low = 2 * free - (tokens - window)
    targets = [
        Fraction(2 * free - low) - Fraction((2 * free - 2 * low) * l, layers - 1)
        for l in range(layers)
    ]
    counts = [math.floor(target) for target in targets]
    order = sorted(range(layers), key=lambda l: (counts[l] - targets[l], l))
    for l in order[: free * layers - sum(counts)]:
        counts[l] += 1
    return [count + window for count in counts]
