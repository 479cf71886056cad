"""MXFP8, MXFP4, NVFP4 and FP8 blocks: golden scalars, packed == quantise-dequantise, exactness in bf16."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashstep.quant import fp8_block, mxfp4, mxfp8, nvfp4
from flashstep.quant.tensor import FORMATS, FP8_BLOCK, MXFP4, MXFP8, NVFP4, Format, QuantTensor

ROW_FORMATS = (MXFP8, MXFP4, NVFP4)
by_name = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)


def row(group: int, *values: float) -> torch.Tensor:
    return torch.cat((torch.tensor(values), torch.zeros(group - len(values))))


def test_golden_scales() -> None:
    assert mxfp8.group_scale(torch.tensor([0.0, 1.0, 448.0, 448.5])).tolist() == [2.0**-22, 2.0**-8, 1.0, 2.0]
    assert mxfp4.group_scale(torch.tensor([6.0, 6.01, 0.0])).tolist() == [1.0, 2.0, 2.0**-126]
    assert nvfp4.group_scale(torch.tensor([10.0, 0.0])).float().tolist() == [1.625, 2.0**-9]


def test_golden_values() -> None:
    assert nvfp4.quantise_dequantise(row(16, 10.0))[0].item() == 9.75
    assert nvfp4.quantise_dequantise(row(16, 1e6))[0].item() == 6 * 448  # scales saturate, values clamp
    assert mxfp4.quantise_dequantise(row(32, 6.0, 2.5, -2.5, 5.0))[:4].tolist() == [6.0, 2.0, -2.0, 4.0]


def test_fp8_ties_go_to_the_even_code() -> None:
    # at scale 1 the step between 16 and 32 is 2, so 17 and 19 are midpoints
    assert mxfp8.quantise_dequantise(row(32, 448.0, 17.0, 19.0, -17.0))[:4].tolist() == [
        448.0,
        16.0,
        20.0,
        -16.0,
    ]


def test_nvfp4_divides_truly() -> None:
    """A tie at the scale 1.625 (5 * 1.625): the reciprocal, rounded, would put it on either side."""
    scale = 1.625
    ties = [m * scale for m in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)]
    got = nvfp4.quantise_dequantise(row(16, 9.75, *ties))[1:8]
    assert got.tolist() == [m * scale for m in (0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0)]


@by_name
def test_packed_equals_quantise_dequantise(format: Format) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 512, generator=generator, dtype=torch.float64).mul(3).exp().bfloat16()
    x = torch.where(torch.rand(x.shape, generator=generator) < 0.5, x, -x)
    packed = QuantTensor.quantise(x, format)
    assert torch.equal(packed.dequantise(torch.bfloat16), format.quantise_dequantise(x))
    assert torch.equal(
        packed.dequantise(torch.bfloat16).double(), packed.dequantise().double()
    )  # exact in bf16


# not NVFP4: its E4M3 scale is recomputed from a rounded amax, so it is not idempotent by definition
@pytest.mark.parametrize("format", (MXFP8, MXFP4, FP8_BLOCK), ids=lambda f: f.name)
def test_a_second_round_trip_changes_nothing(format: Format) -> None:
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    once = format.quantise_dequantise(x)
    assert torch.equal(format.quantise_dequantise(once), once)


@by_name
def test_the_error_stays_inside_the_formats_tolerance(format: Format) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    error = (format.quantise_dequantise(x) - x).abs().max()
    assert 0 < error <= format.tolerance * x.abs().max()


@by_name
def test_zero_rows_are_exact_and_nan_is_not_hidden(format: Format) -> None:
    zero = torch.zeros(32, 64)
    assert torch.equal(format.quantise_dequantise(zero), zero)
    poisoned = zero.clone()
    poisoned[3, 5] = math.nan
    assert format.quantise_dequantise(poisoned)[3, 5].isnan()
    assert QuantTensor.quantise(poisoned, format).dequantise()[3, 5].isnan()


@by_name
def test_rounding_has_no_bias(format: Format) -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(4))
    assert (format.quantise_dequantise(x) - x).mean().abs() < 2e-3 * x.abs().max()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 0xFFFF), min_size=32, max_size=32))
def test_any_finite_bf16_bits(bits: list[int]) -> None:
    x = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.where(x.isfinite() & (x.abs() < 1e30), x, 0)  # the product with the scale must stay finite
    for format in ROW_FORMATS:
        packed = QuantTensor.quantise(x, format)
        assert torch.equal(packed.dequantise(torch.bfloat16), format.quantise_dequantise(x)), format.name
        assert packed.dequantise().abs().max() <= 2 * x.abs().max().float().clamp(min=2**-9)


@pytest.mark.parametrize("shape", [(1, 1), (31, 33), (32, 32), (65, 96), (40, 1)])
def test_ragged_blocks(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    data, scale = fp8_block.quantise(weight)
    assert tuple(scale.shape) == (-(-shape[0] // 32), -(-shape[1] // 32))
    whole = torch.zeros(-(-shape[0] // 32) * 32, -(-shape[1] // 32) * 32)
    whole[: shape[0], : shape[1]] = weight
    expected = fp8_block.quantise_dequantise(whole)[: shape[0], : shape[1]]
    assert torch.equal(fp8_block.dequantise(data, scale), expected)


def test_a_block_has_one_scale_and_its_neighbour_another() -> None:
    weight = torch.ones(64, 64)
    weight[0, 0] = 1000.0
    assert fp8_block.quantise(weight)[1].tolist() == [[129, 119], [119, 119]]


def test_block_scales_of_the_wrong_shape_are_refused() -> None:
    data, scale = fp8_block.quantise(torch.ones(64, 64))
    with pytest.raises(ValueError, match="block scales"):
        fp8_block.dequantise(data, scale[:1])


def test_record_bytes_of_the_released_shapes() -> None:
    """spec/model.md section 10: 528, 288 and 68 bytes."""
    assert (MXFP8.row_bytes(512), NVFP4.row_bytes(512), MXFP4.row_bytes(128)) == (528, 288, 68)
    assert QuantTensor.quantise(torch.ones(3, 512), NVFP4).nbytes == 3 * 288
    with pytest.raises(AssertionError):
        FP8_BLOCK.row_bytes(512)
