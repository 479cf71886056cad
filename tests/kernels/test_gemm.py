"""Linear ops against exact arithmetic on dequantised weights, and independence of a row from its neighbours."""

from typing import Any

import pytest
import torch

from flashstep.kernels.gemm import Gemm, lin8_cost
from flashstep.quant import mxfp8
from flashstep.quant.tensor import FP8_BLOCK, QuantTensor
from tests.kernels.implementations import families

pytestmark = pytest.mark.parametrize("gemm", families(Gemm))
ROWS, INPUTS, OUTPUTS = 37, 96, 64


def inputs(rows: int = ROWS, width: int = INPUTS) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).bfloat16()


def weight(out: int = OUTPUTS, width: int = INPUTS) -> torch.Tensor:
    spread = torch.exp2(torch.randint(-3, 4, (out // 32, width // 32)).float())
    return torch.randn(out, width) * spread.repeat_interleave(32, 0).repeat_interleave(32, 1)


def test_lin8_quantises_its_input_and_prepare_fp8_reads_blocks(gemm: Gemm) -> None:
    w = QuantTensor.quantise(weight(), FP8_BLOCK)
    out = gemm.lin8(gemm.quantise_input(inputs()), gemm.prepare_fp8(w))
    exact = mxfp8.quantise_dequantise(inputs()).double() @ w.dequantise().double().T
    assert torch.equal(out, exact.bfloat16())
    assert not torch.equal(out, (inputs().double() @ w.dequantise().double().T).bfloat16())


def test_weights_side_by_side_equal_one_after_the_other(gemm: Gemm) -> None:
    x, pair = gemm.quantise_input(inputs()), [QuantTensor.quantise(weight(), FP8_BLOCK) for _ in range(2)]
    apart = torch.cat([gemm.lin8(x, gemm.prepare_fp8(w)) for w in pair], dim=1)
    assert torch.equal(gemm.lin8(x, gemm.prepare_fp8(*pair)), apart)
    plain = [w.dequantise().bfloat16() for w in pair]
    apart = torch.cat([gemm.linf(inputs(), gemm.prepare_bf16(w)) for w in plain], dim=1)
    assert torch.equal(gemm.linf(inputs(), gemm.prepare_bf16(*plain)), apart)


def test_linb_rounds_to_bf16_and_linf_does_not(gemm: Gemm) -> None:
    w = weight().bfloat16()
    prepared = gemm.prepare_bf16(w)
    exact = inputs().double() @ w.double().T
    assert torch.equal(gemm.linb(inputs(), prepared), exact.bfloat16())
    assert torch.equal(gemm.linf(inputs(), prepared), exact.float())


def test_linb_grouped_is_block_diagonal_and_prepare_fp8_grouped_splits_rows(gemm: Gemm) -> None:
    w = QuantTensor.quantise(weight(128, 96), FP8_BLOCK)
    x = inputs(ROWS, 2 * 96).unflatten(1, (2, 96))
    out = gemm.linb_grouped(x, gemm.prepare_fp8_grouped(w, groups=2))
    for group, part in enumerate(w.dequantise().double().chunk(2)):
        assert torch.equal(out[:, group], (x[:, group].double() @ part.T).bfloat16())


def test_rows_do_not_see_their_neighbours(gemm: Gemm) -> None:
    prepared = gemm.prepare_fp8(QuantTensor.quantise(weight(), FP8_BLOCK))
    plain = gemm.prepare_bf16(weight().bfloat16())

    def lin8(x: torch.Tensor, w: Any) -> torch.Tensor:
        return gemm.lin8(gemm.quantise_input(x), w)

    for op, w in ((lin8, prepared), (gemm.linf, plain)):
        together = op(inputs(), w)
        for rows in ((0, 1), (5, 12), (36, 37)):
            assert torch.equal(op(inputs()[rows[0] : rows[1]], w), together[rows[0] : rows[1]])


def test_cost_counts_the_weight_once(gemm: Gemm) -> None:
    one, two = (lin8_cost(rows=r, inputs=5120, outputs=512) for r in (1, 2))
    assert two.flops == 2 * one.flops and two.bytes - one.bytes == 2 * (5120 + 512)
