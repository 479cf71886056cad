"""Quantisers into paged records: bytes as the formats say, and never a write outside the rows' own places (A31)."""

import pytest
import torch

from flashstep.kernels.cast import Cast
from flashstep.quant import mxfp4, mxfp8, nvfp4
from tests.kernels.implementations import families

BLOCKS, SLOTS, CHANNELS = 3, 4, 64
MARK = 0xA5
FORMATS = {
    "store_mxfp8": (mxfp8, CHANNELS, CHANNELS // 32),
    "store_nvfp4": (nvfp4, CHANNELS // 2, CHANNELS // 16),
    "store_mxfp4": (mxfp4, CHANNELS // 2, CHANNELS // 32),
}
over_all = pytest.mark.parametrize("cast", families(Cast))
over_stores = pytest.mark.parametrize("name", FORMATS)


def planes(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Views into larger tensors, so that a flat address would go wrong."""
    _, values, scales = FORMATS[name]
    raw = torch.full((BLOCKS, SLOTS * (values + scales)), MARK, dtype=torch.uint8)
    return raw[:, : SLOTS * values].unflatten(1, (SLOTS, values)), raw[:, SLOTS * values :].unflatten(
        1, (SLOTS, scales)
    )


def rows(count: int) -> torch.Tensor:
    x = torch.randn(count, CHANNELS, generator=torch.Generator().manual_seed(count))
    return (x * torch.exp2(torch.arange(count) - 4.0).unsqueeze(1)).bfloat16()


@over_all
def test_round_mxfp4_equals_a_real_record(cast: Cast) -> None:
    x = rows(9)
    assert torch.equal(cast.round_mxfp4(x), mxfp4.dequantise(*mxfp4.quantise(x), dtype=torch.bfloat16))


@over_all
@over_stores
def test_a_stored_record_reads_back_as_the_rounded_value(cast: Cast, name: str) -> None:
    """Spec 13 (ix): packed bytes decode to the fake-quantised bf16 row."""
    x, (values, scales) = rows(6), planes(name)
    slot = torch.tensor([11, 0, 5, 4, 7, 2])
    getattr(cast, name)(x, (values, scales), slot_T=slot)
    form = FORMATS[name][0]
    read = form.dequantise(
        values[slot // SLOTS, slot % SLOTS], scales[slot // SLOTS, slot % SLOTS], dtype=torch.bfloat16
    )
    assert torch.equal(read, form.quantise_dequantise(x))


@over_all
@over_stores
@pytest.mark.parametrize("padding", [-1, -3, BLOCKS * SLOTS, BLOCKS * SLOTS + 7])
def test_a_padding_slot_never_writes(cast: Cast, name: str, padding: int) -> None:
    """A31: five real rows and three of padding; then padding only."""
    x, (values, scales) = rows(8), planes(name)
    slot = torch.tensor([0, padding, 2, 3, padding, 4, 10, padding])
    getattr(cast, name)(x, (values, scales), slot_T=slot)
    touched = (values != MARK).any(2).flatten() | (scales != MARK).any(2).flatten()
    assert touched.nonzero().flatten().tolist() == [0, 2, 3, 4, 10]
    fresh = planes(name)
    getattr(cast, name)(x, fresh, slot_T=torch.full((8,), padding))
    assert all(bool((plane == MARK).all()) for plane in fresh)
