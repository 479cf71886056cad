"""Where the rows of one Engram layer live, in the form in which they are looked up (spec/model.md 6.5).

Owns the two planes of a table: E4M3 values and one E8M0 scale per 32 channels of a row. A copy in host memory keeps a row's
scales behind its values, so that a look-up touches one page a row; the GPU's own memory and a memory map of the checkpoint have
them apart. Takes planes as the source gave them. Knows nothing of hashes and tokens. Suffixes: R table rows, D channels of a row,
G groups of 32 of them.
"""

import weakref

import torch
from torch import Tensor

from flashstep.config.engram import Place
from flashstep.config.model import MX_GROUP
from flashstep.engram import memory
from flashstep.kernels.engram import Planes


class EngramTable:
    """One layer's table."""

    def __init__(self, values_RD: Tensor, scales_RG: Tensor) -> None:
        """``values_RD`` float8_e4m3fn or its bytes [R, D] and ``scales_RG`` float8_e8m0fnu or uint8 [R, D / 32], as they lie."""
        assert values_RD.dtype in (torch.float8_e4m3fn, torch.uint8)
        assert scales_RG.shape == (values_RD.shape[0], values_RD.shape[1] // MX_GROUP)
        self.planes: Planes = (values_RD.view(torch.uint8), scales_RG.view(torch.uint8))

    @classmethod
    def place(
        cls,
        values_RD: Tensor,
        scales_RG: Tensor,
        where: Place,
        *,
        device: torch.device,
        huge: bool = False,
        node: int | None = None,
        name: str = "",
    ) -> "EngramTable":
        """A table whose rows lie ``where``; the given planes may be memory maps.

        ``huge`` asks for transparent huge pages, ``node`` for pages of that NUMA node. ``name`` tells shared tables apart: who
        gives the same name has the same rows. ``ConfigError`` where this host lacks what is asked for.
        """
        if where is Place.MAPPED:
            return cls(values_RD, scales_RG)
        if where is Place.DEVICE:
            return cls(values_RD.to(device, copy=True), scales_RG.to(device, copy=True))
        rows, width = values_RD.shape
        size = rows * (width + scales_RG.shape[1])

        def fill(room: Tensor) -> None:
            joined_RX = room.view(rows, -1)
            joined_RX[:, :width] = values_RD.view(torch.uint8)
            joined_RX[:, width:] = scales_RG.view(torch.uint8)

        if where is Place.SHARED:
            room = memory.shared_memory(name, size, node=node, fill=fill)
        else:
            room = memory.private_memory(size, huge=huge, node=node)
            fill(room)
        joined_RX = room.view(rows, -1)
        table = cls(joined_RX[:, :width], joined_RX[:, width:])
        if where in (Place.PINNED, Place.SHARED):
            memory.pin(room)
            weakref.finalize(table, memory.unpin, room)
        return table

    @property
    def total_bytes(self) -> int:
        return sum(plane.numel() for plane in self.planes)
