"""The public kernels that ours are measured beside: SDPA, FlexAttention, FlashInfer, plain torch.

Each function is a factory: (inputs, context) -> what to time, or `Missing` with the reason.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsekv.bench.attention_inputs import PAGE, Geometry, Packed, Paged
from sparsekv.bench.case import Context, Missing

FLASHINFER = "flashinfer-python==0.6.4"
_WORKSPACE = 384 << 20


def sdpa_flash(x: Packed, context: Context) -> Callable[[], Tensor]:
    """scaled_dot_product_attention, FlashAttention-2 backend."""
    return _sdpa(x, SDPBackend.FLASH_ATTENTION if context.on_gpu else SDPBackend.MATH)


def sdpa_cudnn(x: Packed, context: Context) -> Callable[[], Tensor]:
    """scaled_dot_product_attention, cuDNN backend."""
    context.need_gpu("cuDNN attention")
    return _sdpa(x, SDPBackend.CUDNN_ATTENTION)


def _sdpa(x: Packed, backend: SDPBackend) -> Callable[[], Tensor]:
    q, k, v = x.by_head()

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return run


def flex(x: Packed, context: Context) -> Callable[[], Any]:
    """FlexAttention, compiled, causal block mask, log-sum-exp returned."""
    context.need_gpu("compiled FlexAttention")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return q_index >= k_index

    q, k, v = (tensor.contiguous() for tensor in x.by_head())
    mask = create_block_mask(causal, None, None, x.tokens, x.tokens, device=str(q.device))
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)


def eager_window(rows: int) -> Callable[[Packed, Context], Callable[[], Tensor]]:
    """The window scores of SnapKV ports: softmax over repeated keys, in fp32, then sums."""

    def factory(x: Packed, context: Context) -> Callable[[], Tensor]:
        q, k, _ = x.by_head()
        group = x.heads.heads // x.heads.kv_heads
        hidden = torch.ones(rows, x.tokens, dtype=torch.bool, device=q.device)
        hidden = hidden.triu(x.tokens - rows + 1)

        def run() -> Tensor:
            keys = k.repeat_interleave(group, dim=1)
            logits = q[:, :, -rows:] @ keys.transpose(2, 3) / math.sqrt(x.heads.head_dim)
            logits = logits.masked_fill(hidden, -torch.inf)
            weights = logits.softmax(-1, dtype=torch.float32).to(q.dtype)
            return weights.sum(2).unflatten(1, (-1, group)).mean(2)

        return run

    return factory


# ---------------------------------------------------------------------- FlashInfer


def _flashinfer(context: Context, heads: Geometry) -> Any:
    """The package, with its three modules of this shape built (once a run)."""
    context.need_gpu("FlashInfer")
    try:
        module = importlib.import_module("flashinfer")
    except ImportError as error:
        raise Missing(f"cannot import flashinfer ({error}); pip install {FLASHINFER}") from error

    def build() -> bool:
        jit = importlib.import_module("flashinfer.jit")
        dtypes = (heads.dtype, heads.dtype, heads.dtype, torch.int32)
        shape = (*dtypes, heads.head_dim, heads.head_dim, 0, False, False)
        specs = [jit.gen_batch_prefill_module(name, *shape, False) for name in ("fa2", "fa3")]
        jit.build_jit_specs([*specs, jit.gen_batch_decode_module(*shape)], verbose=False)
        return True

    context.once("flashinfer built", build)
    return module


def _workspace(context: Context, name: str) -> Tensor:
    def make() -> Tensor:
        return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=context.device)

    return context.once(f"workspace {name}", make)


def flashinfer_prefill(backend: str) -> Callable[[Packed, Context], Callable[[], Any]]:
    """FlashInfer's ragged prefill, "fa2" or "fa3", log-sum-exp returned."""

    def factory(x: Packed, context: Context) -> Callable[[], Any]:
        module = _flashinfer(context, x.heads)
        wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(
            _workspace(context, "prefill"), "NHD", backend=backend
        )
        wrapper.plan(
            x.cu, x.cu, x.heads.heads, x.heads.kv_heads, x.heads.head_dim, causal=True,
            q_data_type=x.heads.dtype, kv_data_type=x.heads.dtype,
        )  # fmt: skip
        return lambda: wrapper.run(x.q, x.k, x.v, return_lse=True)

    return factory


def flashinfer_decode(tensor_cores: bool) -> Callable[[Paged, Context], list[Callable[[], Any]]]:
    """FlashInfer's paged decode over all S slots; its pages hold all KV heads of 16 tokens."""

    def factory(x: Paged, context: Context) -> list[Callable[[], Any]]:
        module = _flashinfer(context, x.heads)
        columns, device = x.slots // PAGE, context.device
        pages = x.rows * columns
        indptr = torch.arange(x.rows + 1, dtype=torch.int32, device=device) * columns
        indices = torch.randperm(pages, device=device).int()
        last = torch.full((x.rows,), PAGE, dtype=torch.int32, device=device)
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(context, f"decode {tensor_cores}"), "NHD", use_tensor_cores=tensor_cores
        )
        wrapper.plan(
            indptr, indices, last, x.heads.heads, x.heads.kv_heads, x.heads.head_dim, PAGE,
            q_data_type=x.heads.dtype, kv_data_type=x.heads.dtype,
        )  # fmt: skip
        # The same memory as ours, cut into pages of [16, HK, D].
        shape = (pages, PAGE, x.heads.kv_heads, x.heads.head_dim)
        return [
            _bind(wrapper.run, x.q, (x.k[c, 1:].reshape(shape), x.v[c, 1:].reshape(shape)))
            for c in x.caches
        ]

    return factory


def _bind(run: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: run(*arguments)


# ---------------------------------------------------------------------- plain torch


def torch_append(x: Paged, context: Context) -> list[Callable[[], None]]:
    """One new token a head by four indexed assignments."""
    slot = (x.lens - 1).long()
    page = x.table.long().gather(2, (slot // PAGE)[..., None])[..., 0]
    k = torch.zeros(*page.shape, x.heads.head_dim, dtype=x.heads.dtype, device=context.device)
    position, score = slot.int(), torch.zeros(page.shape, device=context.device)

    def run(c: int) -> None:
        x.k[c][page, slot % PAGE] = k
        x.v[c][page, slot % PAGE] = k
        x.positions[c][page, slot % PAGE] = position
        x.scores[c][page, slot % PAGE] = score

    return [_bind(run, c) for c in x.caches]


def torch_gather(keep: Tensor, x: Paged) -> Callable[[], tuple[Tensor, Tensor]]:
    """Kept keys and values gathered from a dense cache into a new one, as kvpress does."""
    kept = int(keep[0, 0].sum())
    index = keep.nonzero()[:, 2].view(*keep.shape[:2], kept, 1).expand(-1, -1, -1, x.heads.head_dim)
    dense = [y[0, 1:].reshape(*keep.shape, x.heads.head_dim) for y in (x.k, x.v)]
    return lambda: (dense[0].gather(2, index), dense[1].gather(2, index))
