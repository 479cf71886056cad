"""Quantisers into paged records in plain torch."""

from collections.abc import Callable

import torch
from torch import Tensor

from flashstep.kernels.cast import Planes
from flashstep.quant import mxfp4, mxfp8, nvfp4


def round_mxfp4(x: Tensor) -> Tensor:
    """See ``Cast.round_mxfp4``."""
    return mxfp4.quantise_dequantise(x)


def store_mxfp8(x_TC: Tensor, planes: Planes, *, slot_T: Tensor) -> None:
    """See ``Cast.store_mxfp8``."""
    _store(x_TC, planes, slot_T=slot_T, pack=mxfp8.quantise)


def store_nvfp4(x_TC: Tensor, planes: Planes, *, slot_T: Tensor) -> None:
    """See ``Cast.store_nvfp4``."""
    _store(x_TC, planes, slot_T=slot_T, pack=nvfp4.quantise)


def store_mxfp4(x_TC: Tensor, planes: Planes, *, slot_T: Tensor) -> None:
    """See ``Cast.store_mxfp4``."""
    _store(x_TC, planes, slot_T=slot_T, pack=mxfp4.quantise)


def _store(
    x_TC: Tensor, planes: Planes, *, slot_T: Tensor, pack: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> None:
    values, scales = planes
    blocks, slots = values.shape[:2]
    live = (slot_T >= 0) & (
        slot_T < blocks * slots
    )  # before any division: -1 // slots would be the last block
    slot = slot_T[live]
    packed_values, packed_scales = pack(x_TC[live])
    values[slot // slots, slot % slots] = packed_values.view(torch.uint8)
    scales[slot // slots, slot % slots] = packed_scales.view(torch.uint8)
