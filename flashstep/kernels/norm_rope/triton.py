"""RMS norm and rotation in Triton: fp32 inside and one rounding to bf16; the angles' cosines in float64, as the reference.

Takes and gives what ``flashstep.kernels.norm_rope`` says. A row is reduced by one program in a fixed order, whatever stands
beside it. Inputs may have any row stride (a slice of a fused product has); outputs are contiguous. Knows no positions but
those it is given.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_VECTOR_CHANNELS = 4096  # of one rotation program: enough loads in flight, few enough registers


@triton.jit
def _rms_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, eps, CHANNELS: tl.constexpr, CHANNELS_POW2: tl.constexpr
):
    """One row of [T, C], normed."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CHANNELS_POW2)
    held = channel < CHANNELS
    x = tl.load(x_ptr + row * x_stride + channel, mask=held, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + channel, mask=held, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, 0) * (1.0 / CHANNELS)
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(out_ptr + row * CHANNELS + channel, (x * scale * weight).to(tl.bfloat16), mask=held)


@triton.jit
def _angles_kernel(
    positions_ptr, frequencies_ptr, cos_ptr, sin_ptr, elements, PAIRS: tl.constexpr, BLOCK: tl.constexpr
):
    """``BLOCK`` elements of both contiguous [T, P] tables; the angle is rounded to fp32 before its cosine is taken."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = element < elements
    position = tl.load(positions_ptr + element // PAIRS, mask=held, other=0).to(tl.float32)
    frequency = tl.load(frequencies_ptr + element % PAIRS, mask=held, other=0.0)
    angle = (position * frequency).to(tl.float64)
    tl.store(cos_ptr + element, tl.cos(angle).to(tl.float32), mask=held)
    tl.store(sin_ptr + element, tl.sin(angle).to(tl.float32), mask=held)


@triton.jit
def _rotate_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    vectors,
    x_row,
    x_vector,
    cos_row,
    sin_row,
    VECTORS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """``BLOCK`` of the T * V vectors: all channels copied as adjacent pairs, the last P pairs turned."""
    vector = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = vector // VECTORS
    pair = tl.arange(0, PAIRS_POW2)
    held = (vector < vectors)[:, None] & (pair < CHANNELS // 2)[None, :]
    start = row * x_row + (vector % VECTORS) * x_vector
    channel = pair[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    x = tl.load(x_ptr + start[:, None, None] + channel, mask=held[:, :, None], other=0.0)
    even, odd = tl.split(x.to(tl.float32))
    turn = pair - (CHANNELS // 2 - PAIRS)
    turned = held & (turn >= 0)[None, :]
    cos = tl.load(cos_ptr + row[:, None] * cos_row + turn[None, :], mask=turned, other=1.0)
    sin = tl.load(sin_ptr + row[:, None] * sin_row + turn[None, :], mask=turned, other=0.0)
    if INVERSE:
        sin = 0.0 - sin
    # channels that do not turn pass as they are: 0 * inf is NaN, and a sum loses the sign of zero
    even_out = tl.where(turned, even * cos - odd * sin, even)
    odd_out = tl.where(turned, even * sin + odd * cos, odd)
    out = tl.join(even_out, odd_out).to(tl.bfloat16)
    tl.store(out_ptr + vector[:, None, None] * CHANNELS + channel, out, mask=held[:, :, None])


def rms(x_TC: Tensor, weight_C: Tensor, *, eps: float) -> Tensor:
    """See ``NormRope.rms``."""
    channels = x_TC.shape[-1]
    rows = x_TC.flatten(0, -2)  # of a view where there is one
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    if rows.shape[0]:
        _rms_kernel[(rows.shape[0],)](
            rows,
            weight_C.contiguous(),
            out,
            rows.stride(0),
            eps,
            CHANNELS=channels,
            CHANNELS_POW2=triton.next_power_of_2(channels),
            num_warps=_rms_warps(channels),
        )
    return out


def _rms_warps(channels: int) -> int:
    return 8 if channels > 2048 else 4 if channels > 512 else 1


def angles(positions_T: Tensor, frequencies_P: Tensor) -> tuple[Tensor, Tensor]:
    """See ``NormRope.angles``."""
    rows, pairs, block = positions_T.shape[0], frequencies_P.shape[0], 128
    cos, sin = (torch.empty(rows, pairs, dtype=torch.float32, device=frequencies_P.device) for _ in range(2))
    if cos.numel():
        _angles_kernel[(triton.cdiv(cos.numel(), block),)](
            positions_T.contiguous(),
            frequencies_P.contiguous(),
            cos,
            sin,
            cos.numel(),
            PAIRS=pairs,
            BLOCK=block,
            num_warps=4,
        )
    return cos, sin


def rotate(x: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """See ``NormRope.rotate``."""
    return _rotate(x, cos_TP, sin_TP, inverse=False)


def rotate_inverse(x: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """See ``NormRope.rotate_inverse``."""
    return _rotate(x, cos_TP, sin_TP, inverse=True)


def _rotate(x: Tensor, cos_TP: Tensor, sin_TP: Tensor, *, inverse: bool) -> Tensor:
    channels, pairs = x.shape[-1], cos_TP.shape[1]
    assert channels % 2 == 0 and 2 * pairs <= channels and cos_TP.stride(1) == 1 and sin_TP.stride(1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    x_TVC = x.unsqueeze(1) if x.ndim == 2 else x.flatten(1, -2)
    x_TVC = x_TVC if x_TVC.stride(2) == 1 else x_TVC.contiguous()
    vectors, width = x_TVC.shape[0] * x_TVC.shape[1], triton.next_power_of_2(channels)
    # few rows want many programs; a vector's result does not depend on how many share its program
    block = max(1, min(_VECTOR_CHANNELS // width, triton.next_power_of_2(x_TVC.shape[1])))
    _rotate_kernel[(triton.cdiv(vectors, block),)](
        x_TVC,
        cos_TP,
        sin_TP,
        out,
        vectors,
        x_TVC.stride(0),
        x_TVC.stride(1),
        cos_TP.stride(0),
        sin_TP.stride(0),
        VECTORS=x_TVC.shape[1],
        CHANNELS=channels,
        PAIRS=pairs,
        BLOCK=block,
        PAIRS_POW2=width // 2,
        INVERSE=inverse,
        num_warps=_rotation_warps(block * width),
    )
    return out


def _rotation_warps(channels: int) -> int:
    return max(1, min(4, channels // 1024))


_RMS = {
    "x_ptr": "*bf16:16",
    "weight_ptr": "*bf16:16",
    "out_ptr": "*bf16:16",
    "x_stride": "i32:16",
    "eps": "fp32",
}
_ANGLES = {
    "positions_ptr": "*i64:16",
    "frequencies_ptr": "*fp32:16",
    "cos_ptr": "*fp32:16",
    "sin_ptr": "*fp32:16",
    "elements": "i32",
}
_ROTATE = {
    "x_ptr": "*bf16:16",
    "cos_ptr": "*fp32:16",
    "sin_ptr": "*fp32:16",
    "out_ptr": "*bf16:16",
    "vectors": "i32",
    "x_row": "i32:16",
    "x_vector": "i32:16",
    "cos_row": "i32:16",
    "sin_row": "i32:16",
}


def _rotation(vectors: int, channels: int, pairs: int, block: int, *, inverse: bool) -> dict[str, int | bool]:
    return {
        "VECTORS": vectors,
        "CHANNELS": channels,
        "PAIRS": pairs,
        "BLOCK": block,
        "PAIRS_POW2": triton.next_power_of_2(channels) // 2,
        "INVERSE": inverse,
    }


# (kernel, signature, constants, options) to compile ahead of time: released and tiny shapes
AOT = (
    *(
        (
            _rms_kernel,
            _RMS,
            {"CHANNELS": c, "CHANNELS_POW2": triton.next_power_of_2(c)},
            {"num_warps": _rms_warps(c)},
        )
        for c in (5120, 1280, 512, 128, 64)
    ),
    *((_angles_kernel, _ANGLES, {"PAIRS": pairs, "BLOCK": 128}) for pairs in (32, 8)),
    *(
        (
            _rotate_kernel,
            _ROTATE,
            _rotation(vectors, channels, pairs, block, inverse=inverse),
            {"num_warps": _rotation_warps(block * channels)},
        )
        for vectors, channels, pairs, block, inverse in (
            (64, 512, 32, 8, False),
            (16, 512, 32, 8, True),
            (1, 512, 32, 1, False),
            (32, 128, 32, 32, False),
            (4, 64, 8, 4, True),
        )
    ),
)
