"""QuantTensor: data, scales and the format that gives them a meaning, as one value.

A ``Format`` names its scale's granularity, its two storage types and its codec; what a record or a weight costs in bytes
follows from it. Knows nothing of what the tensor is for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flashstep.quant import fp8_block, mxfp4, mxfp8, nvfp4


class _Dequantise(Protocol):
    def __call__(self, data: Tensor, scale: Tensor, *, dtype: torch.dtype = ...) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A numeric format as a value.

    ``group`` is (rows, channels) that share a scale; ``values_per_byte`` is 2 for packed FP4; ``tolerance`` is the largest
    relative error of one rounding against the group's largest magnitude (what a test may allow).
    """

    name: str
    group: tuple[int, int]
    values_per_byte: int
    data_dtype: torch.dtype
    scale_dtype: torch.dtype
    tolerance: float
    quantise: Callable[[Tensor], tuple[Tensor, Tensor]]
    dequantise: _Dequantise
    quantise_dequantise: Callable[[Tensor], Tensor]

    def row_bytes(self, channels: int) -> int:
        """Bytes of one row of ``channels`` values, scales included (formats that group inside a row only)."""
        assert self.group[0] == 1, f"{self.name} shares scales between rows"
        return channels // self.values_per_byte + channels // self.group[1]


MXFP8 = Format(
    name="mxfp8_e4m3_g32",
    group=(1, mxfp8.GROUP),
    values_per_byte=1,
    data_dtype=torch.float8_e4m3fn,
    scale_dtype=torch.uint8,
    tolerance=2.0**-4,
    quantise=mxfp8.quantise,
    dequantise=mxfp8.dequantise,
    quantise_dequantise=mxfp8.quantise_dequantise,
)
MXFP4 = Format(
    name="mxfp4_e2m1_g32",
    group=(1, mxfp4.GROUP),
    values_per_byte=2,
    data_dtype=torch.uint8,
    scale_dtype=torch.uint8,
    tolerance=0.25,
    quantise=mxfp4.quantise,
    dequantise=mxfp4.dequantise,
    quantise_dequantise=mxfp4.quantise_dequantise,
)
NVFP4 = Format(
    name="nvfp4_e2m1_g16",
    group=(1, nvfp4.GROUP),
    values_per_byte=2,
    data_dtype=torch.uint8,
    scale_dtype=torch.float8_e4m3fn,
    tolerance=0.25,
    quantise=nvfp4.quantise,
    dequantise=nvfp4.dequantise,
    quantise_dequantise=nvfp4.quantise_dequantise,
)
FP8_BLOCK = Format(
    name="fp8_e4m3_b32x32",
    group=(fp8_block.BLOCK, fp8_block.BLOCK),
    values_per_byte=1,
    data_dtype=torch.float8_e4m3fn,
    scale_dtype=torch.uint8,
    tolerance=2.0**-4,
    quantise=fp8_block.quantise,
    dequantise=fp8_block.dequantise,
    quantise_dequantise=fp8_block.quantise_dequantise,
)
FORMATS = (MXFP8, MXFP4, NVFP4, FP8_BLOCK)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantTensor:
    """A quantised tensor: ``data`` and ``scale`` as ``format`` stores them, and the ``shape`` of the values."""

    data: Tensor
    scale: Tensor
    format: Format
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.data.dtype == self.format.data_dtype, f"{self.format.name} data is {self.data.dtype}"
        assert self.scale.dtype == self.format.scale_dtype, (
            f"{self.format.name} scales are {self.scale.dtype}"
        )
        assert self.data.numel() * self.format.values_per_byte == torch.Size(self.shape).numel(), (
            "shape and data differ"
        )

    @classmethod
    def quantise(cls, x: Tensor, format: Format) -> "QuantTensor":
        """Quantise ``x`` (any float [..., n]) into ``format``."""
        data, scale = format.quantise(x)
        return cls(data=data, scale=scale, format=format, shape=tuple(x.shape))

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values in ``dtype``; exact in bf16 and wider."""
        return self.format.dequantise(self.data, self.scale, dtype=dtype)

    def to(self, device: torch.device) -> "QuantTensor":
        """The same on ``device``."""
        return QuantTensor(
            data=self.data.to(device), scale=self.scale.to(device), format=self.format, shape=self.shape
        )

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return self.data.nbytes + self.scale.nbytes
