"""Quantisers of activations and cache records (spec/model.md 0 and 10).

Owns the signatures. ``planes`` of a paged group are two uint8 views, values [blocks, slots, value bytes] and scales [blocks,
slots, scale bytes], of any strides. ``slot_T`` numbers places across blocks (block * slots a block + place); a row whose slot
is negative or beyond the last place writes nothing. Suffixes: T rows, C channels.
"""

import torch
from torch import Tensor

from flashstep.kernels.registry import Cost, Family, Implementation

Planes = tuple[Tensor, Tensor]
OPS = ("round_mxfp4", "store_mxfp8", "store_nvfp4", "store_mxfp4")


class Cast(Family):
    """Public quantisers."""

    TABLE = (
        *(
            Implementation(op=f"cast.{op}", module="flashstep.kernels.cast.triton", needs=frozenset({"sm90"}))
            for op in OPS
        ),
        *(Implementation(op=f"cast.{op}", module="flashstep.kernels.cast.reference") for op in OPS),
    )

    def round_mxfp4(self, x: Tensor) -> Tensor:
        """bf16 [..., C] -> bf16, quantised and dequantised per 32 channels (QM4)."""
        assert x.dtype is torch.bfloat16
        return self._loaded["round_mxfp4"](x)

    def store_mxfp8(self, x_TC: Tensor, planes: Planes, *, slot_T: Tensor) -> None:
        """bf16 [T, C] into window records: E4M3 values and one E8M0 scale per 32 channels (Q8)."""
        _check_store(x_TC, planes, slot_T=slot_T)
        self._loaded["store_mxfp8"](x_TC, planes, slot_T=slot_T)

    def store_nvfp4(self, x_TC: Tensor, planes: Planes, *, slot_T: Tensor) -> None:
        """bf16 [T, C] into compressed records: E2M1 pairs and one E4M3 scale per 16 channels (QN4)."""
        _check_store(x_TC, planes, slot_T=slot_T)
        self._loaded["store_nvfp4"](x_TC, planes, slot_T=slot_T)

    def store_mxfp4(self, x_TC: Tensor, planes: Planes, *, slot_T: Tensor) -> None:
        """bf16 [T, C] into index key records: E2M1 pairs and one E8M0 scale per 32 channels (QM4)."""
        _check_store(x_TC, planes, slot_T=slot_T)
        self._loaded["store_mxfp4"](x_TC, planes, slot_T=slot_T)


def _check_store(x_TC: Tensor, planes: Planes, *, slot_T: Tensor) -> None:
    values, scales = planes
    assert x_TC.dtype is torch.bfloat16 and x_TC.ndim == 2 and slot_T.shape == x_TC.shape[:1]
    assert (
        values.dtype is torch.uint8 and scales.dtype is torch.uint8 and values.shape[:2] == scales.shape[:2]
    )


def round_mxfp4_cost(*, rows: int, channels: int) -> Cost:
    """bf16 in and out."""
    return Cost(bytes=4 * rows * channels, flops=4 * rows * channels)


def store_mxfp8_cost(*, rows: int, channels: int) -> Cost:
    """bf16 in, one byte a channel and one a group out."""
    return Cost(bytes=rows * (3 * channels + channels // 32), flops=4 * rows * channels)


def store_nvfp4_cost(*, rows: int, channels: int) -> Cost:
    """bf16 in, half a byte a channel and one a group of 16 out."""
    return Cost(bytes=rows * (2 * channels + channels // 2 + channels // 16), flops=4 * rows * channels)


def store_mxfp4_cost(*, rows: int, channels: int) -> Cost:
    """bf16 in, half a byte a channel and one a group of 32 out."""
    return Cost(bytes=rows * (2 * channels + channels // 2 + channels // 32), flops=4 * rows * channels)
