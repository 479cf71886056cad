"""E8M0: a scale that is a power of two, stored as its biased exponent byte.

Owns the exact power-of-two ceiling (from the IEEE bits of fp32, never through log2) and the byte codec:
byte E means 2^(E - 127), 255 means NaN. Byte 0 (2^-127) is subnormal in fp32 and kept as such.
"""

import math

import torch
from torch import Tensor

NAN_BYTE = 255
BIAS = 127
_MANTISSA_BITS = 23
_SMALLEST_BITS = 1 << 22  # fp32 pattern of 2^-127, which has no exponent field of its own
_NAN_BITS = 0x7FC00000
_MANTISSA, _EXPONENT = 0x7FFFFF, 0x7F800000
_LARGEST = 2.0**127


def ceil_exponent(v: Tensor) -> Tensor:
    """Biased exponent (int32) of the smallest power of two >= ``v`` (fp32, v > 0): exponent field + (mantissa != 0).

    Infinity and NaN give 255. A subnormal counts as 2^-126 (a scale never gets there: its floor is above).
    """
    bits = v.view(torch.int32)
    exponent = (bits >> _MANTISSA_BITS) & 0xFF
    return (exponent + ((bits & 0x7FFFFF) != 0)).clamp(max=NAN_BYTE)


def ceil_power_of_two(v: Tensor) -> Tensor:
    """p2c of spec/model.md section 0: the smallest power of two >= ``v``, exactly. fp32 in, fp32 out, same shape.

    NaN, infinity and what exceeds 2^127 give NaN; a subnormal ``v`` counts as 2^-126.
    """
    ceiling = ((v.view(torch.int32) + _MANTISSA) & _EXPONENT).view(torch.float32)
    return torch.where(v <= _LARGEST, ceiling, math.nan)


def encode(v: Tensor) -> Tensor:
    """uint8 bytes of the power-of-two ceiling of ``v`` (fp32, same shape); exact when ``v`` is a power of two."""
    v = v.float()
    return torch.where(v == 2.0**-BIAS, 0, ceil_exponent(v)).to(torch.uint8)


def decode(scale: Tensor) -> Tensor:
    """fp32 values of E8M0 bytes (uint8 or float8_e8m0fnu, any shape): 2^(E - 127), NaN for 255."""
    return exponent_to_float(as_bytes(scale).to(torch.int32))


def as_bytes(scale: Tensor) -> Tensor:
    """View E8M0 data as uint8: the bytes are exponents, never numbers to convert."""
    if scale.dtype not in (torch.uint8, torch.int8, torch.float8_e8m0fnu):
        raise ValueError(f"E8M0 scales are bytes (uint8, int8 or float8_e8m0fnu); got {scale.dtype}")
    return scale.view(torch.uint8)


def exponent_to_float(exponent: Tensor) -> Tensor:
    """fp32 2^(E - 127) of biased exponents (int32, 0..255); 255 gives NaN."""
    bits = exponent << _MANTISSA_BITS
    bits = torch.where(exponent == 0, _SMALLEST_BITS, bits)
    bits = torch.where(exponent == NAN_BYTE, _NAN_BITS, bits)
    return bits.to(torch.int32).view(torch.float32)
