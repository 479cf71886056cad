"""Quantisers into paged records: bytes as the formats say, and never a write outside the rows' own places (A31)."""

import pytest
import torch

from flashstep.kernels.cast import Cast, reference
from flashstep.quant import mxfp4, mxfp8, nvfp4
from tests.kernels.implementations import DEVICE, families

BLOCKS, SLOTS, CHANNELS = 3, 4, 64
MARK = 0xA5
FORMATS = {
    "store_mxfp8": (mxfp8, CHANNELS, CHANNELS // 32),
    "store_nvfp4": (nvfp4, CHANNELS // 2, CHANNELS // 16),
    "store_mxfp4": (mxfp4, CHANNELS // 2, CHANNELS // 32),
}
over_all = pytest.mark.parametrize("cast", families(Cast))
over_stores = pytest.mark.parametrize("name", FORMATS)


def planes(name: str, *, blocks: int = BLOCKS, slots: int = SLOTS, channels: int = CHANNELS):
    """Views into larger tensors, so that a flat address would go wrong."""
    values, scales = (part * channels // CHANNELS for part in FORMATS[name][1:])
    raw = torch.full((blocks, slots * (values + scales)), MARK, dtype=torch.uint8, device=DEVICE)
    return (
        raw[:, : slots * values].unflatten(1, (slots, values)),
        raw[:, slots * values :].unflatten(1, (slots, scales)),
    )


def rows(count: int, channels: int = CHANNELS) -> torch.Tensor:
    """Rows of many sizes, cut from a wider product as in the model."""
    x = torch.randn(count, channels + 16, generator=torch.Generator().manual_seed(count))
    x = (x * torch.exp2((torch.arange(count) % 23) - 14.0).unsqueeze(1)).bfloat16()
    return x.to(DEVICE)[:, 16:]


def hard(channels: int) -> torch.Tensor:
    """Every number of bf16 but NaN and infinity, each beside others of its group's size; halves of grid steps, both zeros."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[torch.isfinite(every)]
    shuffled = every[torch.randperm(every.numel(), generator=torch.Generator().manual_seed(7))]
    ties = (torch.arange(-96, 96) / 8.0).bfloat16()
    ties = ties[torch.randint(0, ties.numel(), (64 * channels,), generator=torch.Generator().manual_seed(8))]
    scaled = ties.view(64, channels) * torch.exp2(torch.arange(64) - 30.0).bfloat16().unsqueeze(1)
    alone = torch.zeros(4096, 32, dtype=torch.bfloat16)  # what decides the scale, and two of its parts
    alone[:, 3] = every[:: every.numel() // 4096][:4096]
    alone[:, 20] = (alone[:, 3].float() * -0.37).bfloat16()
    parts = [
        part.flatten()[: part.numel() // channels * channels] for part in (every, shuffled, scaled, alone)
    ]
    return torch.cat([part.view(-1, channels) for part in parts]).to(DEVICE)


@over_all
def test_round_mxfp4_equals_a_real_record(cast: Cast) -> None:
    x = rows(9)
    assert torch.equal(cast.round_mxfp4(x), mxfp4.dequantise(*mxfp4.quantise(x), dtype=torch.bfloat16))
    heads = rows(5 * 7, 128).unflatten(0, (5, 7))
    assert torch.equal(cast.round_mxfp4(heads), mxfp4.quantise_dequantise(heads))


@over_all
def test_round_mxfp4_bit_for_bit(cast: Cast) -> None:
    x = hard(128)
    assert torch.equal(cast.round_mxfp4(x).view(torch.int16), reference.round_mxfp4(x).view(torch.int16))


@over_all
@over_stores
@pytest.mark.parametrize("channels", [512, 128, 32, 96])
def test_stored_bytes_are_those_of_the_reference(cast: Cast, name: str, channels: int) -> None:
    """Bit for bit, over all of bf16 at the width of the model, and at other widths."""
    x = hard(channels) if channels == 512 else rows(37, channels)
    blocks = -(-x.shape[0] // 64) + 1
    slot = torch.randperm(blocks * 64, generator=torch.Generator().manual_seed(9))[: x.shape[0]].to(DEVICE)
    shape = {"blocks": blocks, "slots": 64, "channels": channels}
    got, want = planes(name, **shape), planes(name, **shape)
    getattr(cast, name)(x, got, slot_T=slot)
    getattr(reference, name)(x, want, slot_T=slot)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)


@over_all
@over_stores
def test_what_is_no_number_stays_none(cast: Cast, name: str) -> None:
    """NaN and infinity make NaN of their group and of nothing else."""
    x, (values, scales) = rows(3), planes(name)
    x[0, 3], x[1, 40] = float("nan"), float("inf")
    slot = torch.tensor([4, 1, 9], device=DEVICE)
    getattr(cast, name)(x, (values, scales), slot_T=slot)
    form, group = FORMATS[name][0], CHANNELS // scales.shape[2]
    read = form.dequantise(values.flatten(0, 1)[slot], scales.flatten(0, 1)[slot], dtype=torch.float32)
    want = form.quantise_dequantise(x).float()
    assert torch.equal(read.isnan(), want.isnan()) and torch.equal(read.nan_to_num(), want.nan_to_num())
    assert int(read.isnan().sum()) in (2 * group, group)  # NVFP4's scale holds no infinity: it saturates


@over_all
@over_stores
def test_a_stored_record_reads_back_as_the_rounded_value(cast: Cast, name: str) -> None:
    """Spec 13 (ix): packed bytes decode to the fake-quantised bf16 row."""
    x, (values, scales) = rows(6), planes(name)
    slot = torch.tensor([11, 0, 5, 4, 7, 2], device=DEVICE)
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
    slot = torch.tensor([0, padding, 2, 3, padding, 4, 10, padding], device=DEVICE)
    getattr(cast, name)(x, (values, scales), slot_T=slot)
    touched = (values != MARK).any(2).flatten() | (scales != MARK).any(2).flatten()
    assert touched.nonzero().flatten().tolist() == [0, 2, 3, 4, 10]
    fresh = planes(name)
    getattr(cast, name)(x, fresh, slot_T=torch.full((8,), padding, device=DEVICE))
    assert all(bool((plane == MARK).all()) for plane in fresh)
