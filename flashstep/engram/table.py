"""Where the rows of one Engram layer live, and how they are fetched (spec/model.md 6.5).

Owns the two planes of a table: E4M3 values and one E8M0 scale per 32 channels of a row. Takes row ids, gives dequantised
rows (exact in bf16). The planes may be a loaded copy, a memory map of the checkpoint (pages are read when a row is), or
pinned host memory. Knows nothing of hashes and tokens. Suffixes: R table rows, D channels of a row.
"""

import torch
from torch import Tensor

from flashstep.config.errors import ConfigError
from flashstep.config.model import MX_GROUP
from flashstep.quant import mxfp8

MEMORY = "memory"
MMAP = "mmap"
PINNED = "pinned"


class EngramTable:
    """One layer's table; ``device`` is where gathered rows are wanted."""

    def __init__(self, values_RD: Tensor, scales_RG: Tensor, *, device: torch.device) -> None:
        """``values_RD`` float8_e4m3fn [R, D] and ``scales_RG`` float8_e8m0fnu or uint8 [R, D / 32], kept as they are."""
        assert values_RD.dtype is torch.float8_e4m3fn
        assert scales_RG.shape == (values_RD.shape[0], values_RD.shape[1] // MX_GROUP)
        self._values_RD = values_RD
        self._scales_RG = scales_RG.view(torch.uint8)
        self._device = device

    @classmethod
    def place(
        cls, values_RD: Tensor, scales_RG: Tensor, *, where: str, device: torch.device
    ) -> "EngramTable":
        """A table whose planes are moved to ``where`` ("memory", "mmap", "pinned"); the given ones may be memory maps."""
        if where == MEMORY:
            return cls(values_RD.to(device, copy=True), scales_RG.to(device, copy=True), device=device)
        if where == MMAP:
            return cls(values_RD, scales_RG, device=device)
        assert where == PINNED, f"unknown place of an Engram table: {where}"
        if not torch.cuda.is_available():
            reason = "engram_table is 'pinned', and this machine has no accelerator to pin memory for; use 'memory' or 'mmap'"
            raise ConfigError("the engine", [reason])
        return cls(values_RD.pin_memory(), scales_RG.pin_memory(), device=device)

    @property
    def total_bytes(self) -> int:
        return self._values_RD.numel() + self._scales_RG.numel()

    def rows(self, row_ids: Tensor) -> Tensor:
        """int64 [..] -> bf16 [.., D] on the device that was asked for."""
        flat = row_ids.flatten().to(self._values_RD.device)
        values = self._values_RD.view(torch.uint8)[flat].to(self._device).view(torch.float8_e4m3fn)
        scales = self._scales_RG[flat].to(self._device)
        return mxfp8.dequantise(values, scales, dtype=torch.bfloat16).unflatten(0, row_ids.shape)
