"""What kvpress keeps of each prompt; runs in kvpress's own interpreter and knows nothing of ours.

    python kvpress_worker.py CASES.json OUT.npz

CASES.json: {"model": folder, "prompts": {name: token ids}, "cases": [{"id", "prompt", "press",
"eager"}]}; a press is {"class": name, field: value or press, ...}. OUT.npz holds, for each id,
"kept/ID" bool [L, HK, T] and, where the press ranks by scores, "scores/ID" fp32 [L, HK, T].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import kvpress
import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache


@torch.no_grad()
def main() -> None:
    """Run all cases; progress goes to stderr."""
    torch.set_num_threads(1)
    work = json.loads(Path(sys.argv[1]).read_text())
    models = {}
    full: dict[tuple[str, bool], list[torch.Tensor]] = {}
    out: dict[str, np.ndarray] = {}
    for case in work["cases"]:
        eager, name = case["eager"], case["prompt"]
        if eager not in models:
            how = "eager" if eager else "sdpa"
            models[eager] = AutoModelForCausalLM.from_pretrained(
                work["model"], dtype=torch.float32, attn_implementation=how
            ).eval()
        model, ids = models[eager], torch.tensor([work["prompts"][name]])
        if (name, eager) not in full:
            full[name, eager] = keys_of(prefill(model, ids))
        press, scores = made(case["press"], case["gates"]), {}
        record(press, scores)
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = None
        with press(model):
            cache = prefill(model, ids)
        masks = [layer.self_attn.masked_key_indices for layer in model.model.layers]
        out[f"kept/{case['id']}"] = kept(keys_of(cache), full[name, eager], masks)
        if len(scores) == len(masks):
            out[f"scores/{case['id']}"] = np.stack([scores[i] for i in range(len(masks))])
        print(case["id"], file=sys.stderr, flush=True)
    np.savez_compressed(sys.argv[2], **out)


def made(spec: dict[str, Any], gates: dict[str, Any] | None) -> Any:
    """The press of a specification, inner ones first; gates stand in for a download."""
    fields = {k: made(v, None) if isinstance(v, dict) else v for k, v in spec.items()}
    cls = getattr(kvpress, fields.pop("class"))
    if gates is not None:
        pattern = (gates["sinks"], gates["recent"], np.array(gates["gates"]))
        cls.load_attention_pattern = staticmethod(lambda model: pattern)
    return cls(**fields)


def record(press: Any, scores: dict[int, np.ndarray]) -> None:
    """Keep a copy of the scores that a press, or else the one inside it, ranks a layer by."""
    if not hasattr(press, "score"):
        press = getattr(press, "press", None)
    if not hasattr(press, "score"):
        return
    score = press.score

    def recorded(module: Any, *args: Any) -> torch.Tensor:
        result = score(module, *args)
        scores[module.layer_idx] = result[0].float().numpy().copy()
        return result

    press.score = recorded


def prefill(model: Any, ids: torch.Tensor) -> DynamicCache:
    """The cache after a prompt [1, T]."""
    cache = DynamicCache()
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    return cache


def keys_of(cache: DynamicCache) -> list[torch.Tensor]:
    """[HK, T, D] a layer."""
    return [layer.keys[0].clone() for layer in cache.layers]


def kept(held: list[torch.Tensor], full: list[torch.Tensor], masks: list[Any]) -> np.ndarray:
    """bool [L, HK, T]: keys are moved bit by bit, so equal ones tell their positions."""
    layers = []
    for mine, all_, masked in zip(held, full, masks, strict=True):
        stay = torch.zeros(all_.shape[:2], dtype=torch.bool)
        for head, keys in enumerate(all_.numpy()):
            position = {key.tobytes(): j for j, key in enumerate(keys)}
            if len(position) != len(keys):
                raise RuntimeError("two positions have the same key")
            stay[head, [position[key.tobytes()] for key in mine[head].numpy()]] = True
        if masked is not None:
            rows, heads_of, positions = masked
            assert (rows == 0).all() and mine.shape == all_.shape
            stay[heads_of, positions] = False
        layers.append(stay.numpy())
    return np.stack(layers)


if __name__ == "__main__":
    main()
