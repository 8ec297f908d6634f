"""What the kernel files share: constants, jit helpers, the config lookup and argument checks.

Inside kernels softmax runs in base 2: logits are multiplied by log2(e) once, so that a probability
is one fused multiply-add and one exp2. At every interface the LSE is a natural logarithm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeVar, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)

MAX_HEAD_DIM = 256
ARCHS = ("sm80", "sm89", "sm90", "sm100", "sm120", "gfx942")
PDL_ARCHS = ("sm90", "sm100", "sm120")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# Of the query heads of a KV head.
Reduction = Literal["mean", "max", "sum"]
Config = TypeVar("Config")
# (kernel, signature, constexprs, launch options, arch): what an ahead-of-time compilation needs.
AotRow = tuple[Any, dict[str, str], dict[str, Any], dict[str, Any], str]


@triton.jit
def base2_logits(dots, softmax_scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """log2(e) * logit from raw q.k dots, fp32, any shape; with softcap c: logit = c tanh(x / c).

    tanh(y) = 1 - 2 / (1 + exp(2 y)), exp through exp2; saturates to +-1 without overflow trouble.
    """
    if HAS_SOFTCAP:
        e = tl.exp2(dots * (2.0 * LOG2E * softmax_scale / softcap))
        return (softcap * LOG2E) * (1.0 - 2.0 / (1.0 + e))
    return dots * (softmax_scale * LOG2E)


@triton.jit
def block_logits(
    q, cache, block, offset, seen, stride_cn, stride_cp, offs_d, in_d, softmax_scale, softcap,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Base-2 logits [M, N] of queries q [M, BLOCK_D] and the N keys at these places of a paged
    cache, whose heads share blocks; of a key that is not `seen`, 0."""
    rows = block * stride_cn + offset * stride_cp
    k = tl.load(cache + rows[:, None] + offs_d[None, :], mask=seen[:, None] & in_d, other=0.0)
    dots = tl.dot(q, tl.trans(k), input_precision="ieee")
    return base2_logits(dots, softmax_scale, softcap, HAS_SOFTCAP)


@triton.jit
def visible(pos_q, pos_k, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """May the query at pos_q see the key at pos_k? bool, broadcast of both shapes.

    A window W shows the query itself and W - 1 older keys (Hugging Face's rule).
    """
    seen = pos_q >= pos_k
    if HAS_WINDOW:
        near = pos_q - pos_k < window
        seen = (seen & near) if CAUSAL else near
    return seen


@lru_cache(maxsize=32)
def _cuda_arch(index: int) -> str:
    if torch.version.hip is not None:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(index)
    if major < 8:
        raise ValueError(f"expected a CUDA device of capability >= 8.0, got {major}.{minor}")
    if major == 8:  # 8.6 and 8.9 have 99 KB of shared memory, 8.0 and 8.7 have 163 KB
        return "sm80" if minor in (0, 7) else "sm89"
    return {9: "sm90", 10: "sm100", 11: "sm100"}.get(major, "sm120")


def arch_of(device: torch.device) -> str:
    """Config table key of a device: one of ARCHS, or "cpu" (the Triton interpreter)."""
    if device.type == "cpu":
        return "cpu"
    return _cuda_arch(torch.cuda.current_device() if device.index is None else device.index)


def has_dependent_launch(device: torch.device) -> bool:
    """Whether kernels can be set up while the one before runs."""
    return arch_of(device) in PDL_ARCHS


def lookup(table: Mapping[tuple[str, int], Config], q: Tensor) -> Config:
    """Row of `table` for q [..., D]: key (arch, padded head_dim).

    On a GPU, fp32 inputs use arch "fp32" where the table has it (no tensor cores: small tiles).
    The interpreter uses arch "cpu" where the table has it, else "sm90".
    """
    block_d = padded_head_dim(q.shape[-1])
    arch = arch_of(q.device)
    first = "fp32" if arch != "cpu" and q.dtype == torch.float32 else arch
    for key in (first, "sm90" if arch == "cpu" else arch):
        if (key, block_d) in table:
            return table[key, block_d]
    raise ValueError(f"expected a config row for padded head_dim {block_d}, got none for {arch}")


def padded_head_dim(head_dim: int) -> int:
    """Next power of two >= max(16, head_dim); kernels load the padding as zeros.

    Raises ValueError unless head_dim is a multiple of 8 in 8..256.
    """
    if not 0 < head_dim <= MAX_HEAD_DIM or head_dim % 8:
        raise ValueError(f"expected head_dim to be a multiple of 8 in 8..256, got {head_dim}")
    return max(16, triton.next_power_of_2(head_dim))


def launch_options(num_warps: int, num_stages: int) -> dict[str, int | bool]:
    """Launch options; FP fusion is asked for, since triton 3.10 turns off what attention needs."""
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}


def dependent_launch(device: torch.device, num_warps: int) -> dict[str, Any]:
    """Launch options of a kernel that follows another: where it can, it is set up while that runs.

    Programmatic dependent launch: the kernel waits on the device for the one before to be complete.
    """
    pdl = has_dependent_launch(device)
    return launch_options(num_warps, 1) | {"PDL": pdl} | ({"launch_pdl": True} if pdl else {})


def aot_row(
    kernel: Any, arch: str, types: dict[str, str], constexprs: dict[str, Any], options: dict
) -> AotRow:
    """A row for aot_signatures(): arguments in neither dict are strides (i32) or absent (None)."""
    missing = [name for name in kernel.arg_names if name not in types and name not in constexprs]
    strides = {name: "i32" for name in missing if name.startswith("stride_")}
    constants = constexprs | {name: None for name in missing if name not in strides}
    return kernel, types | strides | dict.fromkeys(constants, "constexpr"), constants, options, arch


def check_shape(name: str, tensor: Tensor, shape: Sequence[int | None]) -> None:
    """Raise ValueError unless tensor has `shape`; None in it matches any size."""
    fits = len(tensor.shape) == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=False)
    )
    if not fits:
        want = [("*" if size is None else size) for size in shape]
        raise ValueError(f"expected {name} of shape {want}, got {list(tensor.shape)}")


def check_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Raise ValueError unless tensor.dtype is one of `dtypes`."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"expected {name} of dtype {dtypes}, got {tensor.dtype}")


def check_last_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the last dimension of tensor has stride 1."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"expected {name}.stride(-1) == 1, got strides {tensor.stride()}")


def check_reduction(reduction: str) -> None:
    """Raise ValueError unless it is a `Reduction`."""
    if reduction not in get_args(Reduction):
        raise ValueError(f"expected reduction in {get_args(Reduction)}, got {reduction!r}")


def send(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers from the host, on `device`; the host does not wait for a GPU."""
    if device.type != "cuda":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def check_alike(name: str, tensors: Sequence[Tensor], count: int) -> None:
    """ValueError unless these are `count` tensors of one shape, layout and dtype."""
    if len(tensors) != count:
        raise ValueError(f"expected {count} {name}, got {len(tensors)}")
    first = tensors[0]
    shape, strides, dtype = first.shape, first.stride(), first.dtype
    for tensor in tensors:
        if tensor.shape != shape or tensor.stride() != strides or tensor.dtype != dtype:
            raise ValueError(
                f"expected {name} of one layout, got {list(tensor.shape)} beside {list(shape)}, "
                f"strides {tensor.stride()} beside {strides}"
            )


def distances(tensors: Sequence[Tensor], unit: int) -> list[int]:
    """From the first tensor to each, in units of `unit` bytes; ValueError where they do not fit."""
    first = tensors[0].data_ptr()
    found = [tensor.data_ptr() - first for tensor in tensors]
    if any(distance % unit for distance in found):
        raise ValueError(f"expected tensors {unit} bytes apart or a multiple, got {found}")
    return [distance // unit for distance in found]


def check_heads(num_heads: int, num_kv_heads: int) -> int:
    """G = HQ / HK; ValueError unless HK divides HQ."""
    if num_kv_heads <= 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"expected query heads to be a multiple of KV heads, got {num_heads} and {num_kv_heads}"
        )
    return num_heads // num_kv_heads
