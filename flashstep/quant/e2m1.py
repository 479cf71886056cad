"""E2M1 (FP4): rounding to the grid, codes, and two codes in a byte.

Magnitudes {0, .5, 1, 1.5, 2, 3, 4, 6} have codes 0..7, the sign is bit 3. Ties go to the even code. Channel 2i is the
LOW nibble of byte i, channel 2i + 1 the high one. Packed FP4 always travels as uint8.
"""

from functools import cache

import torch
from torch import Tensor

MAX = 6.0
TABLE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def round_to_grid(v: Tensor) -> Tensor:
    """Nearest E2M1 value of ``v`` (fp32, |v| <= 6), ties to the even code; the sign of zero is kept. Same shape.

    Inside a binade the grid is uniform (steps .5, 1, 2), and an even multiple of the step is an even code, so
    round-half-to-even on the multiple is the rule of the format.
    """
    a = v.abs()
    low = torch.round(a * 2) * 0.5
    high = torch.where(a < 4, torch.round(a), torch.round(a * 0.5) * 2)
    return torch.copysign(torch.where(a < 2, low, high), v)


def encode(grid: Tensor) -> Tensor:
    """uint8 codes 0..15 of values that lie on the grid (fp32, same shape). NaN gets code 0: its scale carries the NaN."""
    a = grid.abs().nan_to_num(0.0)
    code = torch.where(a < 2, a * 2, torch.where(a < 4, a + 2, a * 0.5 + 4)).to(torch.uint8)
    return code | (torch.signbit(grid).to(torch.uint8) << 3)


def pack(code: Tensor) -> Tensor:
    """Pack uint8 codes [..., n] into bytes [..., n / 2], the even channel in the low nibble."""
    if code.shape[-1] % 2:
        raise ValueError(f"FP4 packs pairs of channels; the last dimension is {code.shape[-1]}")
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Codes (uint8 [..., 2n]) of packed bytes [..., n] (uint8 or int8, as safetensors stores them)."""
    if packed.dtype not in (torch.uint8, torch.int8):
        raise ValueError(f"packed FP4 travels as uint8 (or int8 in a checkpoint); got {packed.dtype}")
    byte = packed.view(torch.uint8)
    return torch.stack((byte & 0xF, byte >> 4), dim=-1).flatten(-2)


def decode(packed: Tensor) -> Tensor:
    """fp32 grid values [..., 2n] of packed bytes [..., n], through a table of all 256 pairs.

    A pair travels as one 64-bit number: a look-up a byte, and ``index_select`` is 20 times as fast on a flat table (CPU).
    """
    found = _pairs(packed.device).index_select(0, packed.contiguous().view(torch.uint8).flatten().int())
    return found.view(torch.float32).view(*packed.shape[:-1], 2 * packed.shape[-1])


@cache
@torch.inference_mode(False)
def _pairs(device: torch.device) -> Tensor:
    table = torch.tensor(TABLE, dtype=torch.float32, device=device)
    return table[unpack(torch.arange(256, dtype=torch.uint8, device=device)).long()].view(torch.int64)
