"""E2M1: the grid, ties to the even code, codes, nibble order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashstep.quant import e2m1

MIDPOINTS = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
GRID = torch.tensor(e2m1.TABLE[:8])


@pytest.mark.parametrize(("value", "expected"), MIDPOINTS.items())
def test_midpoints_go_to_the_even_code(value: float, expected: float) -> None:
    both = torch.tensor([value, -value])
    assert e2m1.round_to_grid(both).tolist() == [expected, -expected]
    assert (e2m1.encode(e2m1.round_to_grid(both)) & 1).tolist() == [0, 0]


@pytest.mark.parametrize("value", MIDPOINTS)
def test_beside_a_midpoint_the_nearer_value_wins(value: float) -> None:
    below = torch.nextafter(torch.tensor(value), torch.tensor(0.0))
    above = torch.nextafter(torch.tensor(value), torch.tensor(9.0))
    neighbours = GRID[(GRID - value).abs().topk(2, largest=False).indices].sort().values
    assert e2m1.round_to_grid(torch.stack((below, above))).tolist() == neighbours.tolist()


@given(st.floats(-6, 6, width=32))
def test_nothing_on_the_grid_is_nearer(value: float) -> None:
    rounded = e2m1.round_to_grid(torch.tensor(value)).item()
    assert abs(rounded - value) == min(abs(g - value) for g in e2m1.TABLE)


def test_every_code_survives() -> None:
    values = torch.tensor(e2m1.TABLE)
    assert e2m1.encode(values).tolist() == list(range(16))
    assert torch.equal(e2m1.round_to_grid(values), values)


def test_the_even_channel_is_the_low_nibble() -> None:
    packed = e2m1.pack(e2m1.encode(torch.tensor([0.5, -6.0])))
    assert packed.tolist() == [0xF1]
    assert packed.dtype is torch.uint8
    assert e2m1.decode(packed).tolist() == [0.5, -6.0]


def test_every_byte_survives_unpacking() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(e2m1.pack(e2m1.unpack(byte)), byte)
    assert torch.equal(e2m1.unpack(byte.view(torch.int8)), e2m1.unpack(byte))  # as safetensors stores it


def test_an_odd_number_of_channels_and_a_float_are_refused() -> None:
    with pytest.raises(ValueError, match="pairs"):
        e2m1.pack(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8"):
        e2m1.unpack(torch.zeros(2))
