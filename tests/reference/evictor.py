"""`Reference`: a model under a policy, one row, fed token by token or in chunks.

    prefill   attend densely, then cut every head to its plan
    chunk     T > 1 tokens onto a cache: attend all kept and causally themselves, then cut
    decode    "replace": drop the victim, then attend;  "evict": attend, then drop it;
              "interval": attend, and once more than the budget is held compress;  or grow
    block     keydiff: a prompt is a chunk after the other, inside each layer

kv_dtype: a prompt is attended as it is; every later step attends all keys and values rounded to
what the format can hold, each vector by itself, so that it does not matter when that happens.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from reference import attention
from reference.cuts import compress, cut, limits_after_prompt, victim
from reference.plans import make_plans
from reference.quest import attended
from reference.scores import innermost
from reference.state import observe
from reference.types import Head, Plan, View

NAME = "reference"
_RINGS = ("scissorhands", "rkv")  # their last queries stay, whatever phase they came in


class Reference:
    """A copy of `model` under `policy`.

    remember: later prefill chunks are also scored by the queries of the chunks before them.
    page: tokens a page of quest. heads[layer][kv_head] is what is kept.
    """

    def __init__(
        self,
        model: Any,
        policy: Any,
        budget: int | float,
        remember: bool = True,
        kv_dtype: str | None = None,
        page: int = 16,
    ) -> None:
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation(NAME)
        self.policy, self.budget, self.remember = policy, budget, remember
        self.kv_dtype, self.page = kv_dtype, page
        self.reset()

    def reset(self) -> None:
        """Forget every token."""
        config = self.model.config
        self.cache = DynamicCache()
        self.heads: list[list[Head]] = [
            [{} for _ in range(config.num_key_value_heads)] for _ in range(config.num_hidden_layers)
        ]
        self.plans: dict[int, Plan] = {}
        self.steps: dict[int, int] = {}
        self.queries: dict[int, tuple[Tensor, list[int]]] = {}
        self.unrotated: dict[int, list[Tensor]] = {}

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

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [HQ, T, D] of the new tokens, k and v [HK, N, D] of all tokens ever -> [T, HQ, D]."""
        q, k, v = q.double(), k.double(), v.double()
        tokens, seen, layer = q.shape[1], k.shape[1], module.layer_idx
        if tokens == 1 and seen > 1:
            self.steps[layer] += 1
            return self.decode(self.view(module, q, k, v, scale, "decode"))
        self.begin_prompt(layer, seen - tokens, seen)
        block = self.policy.block if self.policy.name == "keydiff" else tokens
        outs = []
        for start in range(seen - tokens, seen, block):
            end = min(start + block, seen)
            part = q[:, start - seen + tokens : end - seen + tokens]
            outs.append(
                self.prompt(self.view(module, part, k[:, :end], v[:, :end], scale, "prefill"))
            )
        return torch.cat(outs)

    def begin_prompt(self, layer: int, before: int, seen: int) -> None:
        """A new plan for `seen` tokens; sinks that are gone already are not protected."""
        plan = make_plans(self.policy, self.budget, len(self.heads), seen)[layer]
        if any(len(head) < before for head in self.heads[layer]):
            plan = _fewer_sinks(plan, self.plans[layer])
        self.plans[layer], self.steps[layer] = plan, 0

    def view(self, module: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, phase: str) -> View:
        """What the policy looks at; k and v end with the tokens of q."""
        layer, seen = module.layer_idx, k.shape[1]
        if self.kv_dtype is not None and seen > q.shape[1]:
            k, v = (attention.rounded(x, self.kv_dtype) for x in (k, v))
        at = list(range(seen - q.shape[1], seen))
        theta = self.model.config.rope_parameters["rope_theta"]
        self.remember_moments(layer, phase, q, at, theta)
        return View(
            policy=self.policy, layer=layer, plan=self.plans[layer], heads=self.heads[layer],
            q=q, at=at, window=self.window(layer, phase, q, at), k=k, v=v, scale=scale, theta=theta,
            rows=lambda queries, places: self.probabilities(layer, queries, places, k, scale),
            o_proj=module.o_proj.weight.double() if hasattr(module, "o_proj") else None,
            unrotated=self.unrotated.get(layer, []), steps=self.steps[layer],
        )  # fmt: skip

    def prompt(self, view: View) -> Tensor:
        """Attend several tokens, then cut; [T, HQ, D]."""
        for head in view.heads:
            head |= dict.fromkeys(view.at, 0.0)
        probabilities = view.rows(view.q, view.at)
        observe(view, "prefill", probabilities)
        cut(view, limits_after_prompt(view))
        return _mix(probabilities, view)

    def decode(self, view: View) -> Tensor:
        """One token; [1, HQ, D]."""
        (current,) = view.at
        for h, head in enumerate(view.heads):
            plan = view.plan.of(h)
            if plan.decode == "replace" and len(head) >= plan.budget:
                del head[victim(view, h, current)]
            head[current] = 0.0
        probabilities = self.decode_row(view)
        observe(view, "decode", probabilities)
        for h, head in enumerate(view.heads):
            plan = view.plan.of(h)
            if plan.decode == "evict" and len(head) > plan.budget:
                del head[victim(view, h, current)]
        if view.plan.decode == "interval":
            compress(view)
        return _mix(probabilities, view)

    def decode_row(self, view: View) -> Tensor:
        """Probabilities [HQ, 1, N] of the step: over what is kept, or over quest's pages."""
        if view.plan.select is None:
            return view.rows(view.q, view.at)
        everything = self.heads[view.layer]
        groups = view.q[:, 0].unflatten(0, (view.kv_heads, -1))
        self.heads[view.layer] = [
            dict.fromkeys(
                attended(
                    groups[h], view.k[h, view.kept(h)], view.kept(h), self.page, view.plan.select
                ),
                0.0,
            )
            for h in range(view.kv_heads)
        ]
        rows = view.rows(view.q, view.at)
        self.heads[view.layer] = everything
        return rows

    def window(self, layer: int, phase: str, q: Tensor, at: list[int]) -> tuple[Tensor, list[int]]:
        """The observation queries: the last of this forward and, remembered, of those before."""
        inner = innermost(self.policy)
        ring = inner.name in _RINGS
        if phase == "decode" and not ring:
            self.queries.pop(layer, None)
            return q, at
        if layer in self.queries:
            q, at = torch.cat([self.queries[layer][0], q], 1), self.queries[layer][1] + at
        rows = inner.window_rows if inner.name == "layersplit" else getattr(inner, "window", 1)
        q, at = q[:, -rows:], at[-rows:]
        if self.remember or ring:
            self.queries[layer] = (q, at)
        return q, at

    def remember_moments(
        self, layer: int, phase: str, q: Tensor, at: list[int], theta: float
    ) -> None:
        """expected: a prompt's queries before RoPE, but those of sinks; a decode step ends it."""
        inner = innermost(self.policy)
        if phase == "decode":
            self.unrotated.pop(layer, None)
        if inner.name != "expected" or phase == "decode":
            return
        back = attention.rotated(q, -torch.tensor(at), theta)
        self.unrotated.setdefault(layer, []).append(back[:, [j >= inner.sinks for j in at]])

    def probabilities(
        self, layer: int, q: Tensor, at: list[int], k: Tensor, scale: float
    ) -> Tensor:
        """Softmax of queries q [HQ, R, D] at positions `at` over what is kept: [HQ, R, N]."""
        position = torch.arange(k.shape[1])
        kept = attention.held(self.heads[layer], k.shape[1])
        if getattr(self.policy, "positions", "original") == "cache":
            # The published formula: keys rotated by their slot, the query by the last slot.
            theta = self.model.config.rope_parameters["rope_theta"]
            slot = kept[0].long().cumsum(0) - 1
            k = attention.rotated(attention.rotated(k, -position, theta), slot, theta)
            q = attention.rotated(q, -torch.tensor(at), theta)
            q = attention.rotated(q, slot[at], theta)
        visible = kept[:, None] & (position <= torch.tensor(at)[:, None])  # [HK, R, N]
        return attention.softmax_rows(attention.masked_logits(q, k, visible, scale))


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any
) -> tuple[Tensor, None]:
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    out = kwargs["reference"].attend(module, query[0], key[0], value[0], scale)
    return out[None].to(query.dtype), None


def _mix(probabilities: Tensor, view: View) -> Tensor:
    return torch.einsum("htn,hnd->thd", probabilities, attention.repeated(view.v, view.q))


def _fewer_sinks(plan: Plan, before: Plan) -> Plan:
    """Sinks of a later prompt, no more than the earlier one kept."""
    heads = plan.heads and [
        replace(new, sinks=min(new.sinks, old.sinks))
        for new, old in zip(plan.heads, before.heads, strict=True)
    ]
    return replace(plan, sinks=min(plan.sinks, before.sinks), heads=heads)
