"""E8M0: the exact power-of-two ceiling and its bytes, over arbitrary fp32 bit patterns."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashstep.quant import e8m0

NORMAL = st.integers(0x00800000, 0x7EFFFFFF)  # patterns of positive normal fp32 numbers below 2^127


def from_bits(bits: int) -> torch.Tensor:
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)


@given(NORMAL)
def test_ceiling_is_the_smallest_power_of_two_not_below(bits: int) -> None:
    v = from_bits(bits)
    ceiling = e8m0.ceil_power_of_two(v).item()
    assert math.frexp(ceiling)[0] == 0.5
    assert ceiling / 2 < v.item() <= ceiling


def test_powers_of_two_are_their_own_ceiling_and_the_next_float_is_not() -> None:
    power = 2.0 ** torch.arange(-126, 127, dtype=torch.float64)
    power = power.float()
    assert torch.equal(e8m0.ceil_power_of_two(power), power)
    assert torch.equal(e8m0.ceil_power_of_two(torch.nextafter(power, torch.tensor(math.inf))), 2 * power)


def test_every_byte_survives_decoding_and_encoding() -> None:
    byte = torch.arange(255, dtype=torch.uint8)
    value = e8m0.decode(byte)
    expected = 2.0 ** (torch.arange(255, dtype=torch.float64) - 127)
    assert torch.equal(value.double(), expected)
    assert torch.equal(e8m0.encode(value), byte)


def test_byte_255_is_nan_both_ways() -> None:
    assert e8m0.decode(torch.tensor([255], dtype=torch.uint8)).isnan().all()
    assert e8m0.encode(torch.tensor([math.nan, math.inf])).tolist() == [255, 255]


def test_scales_are_read_as_bytes_never_as_numbers() -> None:
    stored = torch.tensor([120, 127, 130], dtype=torch.uint8)
    assert e8m0.decode(stored.view(torch.float8_e8m0fnu)).tolist() == [2.0**-7, 1.0, 8.0]
    with pytest.raises(ValueError, match="bytes"):
        e8m0.decode(torch.tensor([127], dtype=torch.int64))
