"""Linear ops against exact arithmetic on dequantised weights, and independence of a row from its neighbours."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashstep.kernels import choose_ops
from flashstep.kernels.device import device_facts
from flashstep.kernels.gemm import Gemm, lin8_cost
from flashstep.kernels.registry import Switch, choose
from flashstep.quant import mxfp8
from flashstep.quant.tensor import FP8_BLOCK, QuantTensor
from tests.kernels.implementations import DEVICE

# what a device with these facts is given
LAYERS = {
    "reference": set(),
    "triton": {"cuda", "sm90"},
    "cuda": {"cuda", "sm90", "nvcc"},
    "free_order": {"cuda", "sm90", "nvcc", "any_order"},
}


def layers() -> list[Any]:
    found = []
    for name, facts in LAYERS.items():
        if facts <= device_facts(DEVICE):
            chosen = choose(Gemm.TABLE, facts=frozenset(facts), switch=Switch())
            found.append(pytest.param(Gemm({op: choice.load() for op, choice in chosen.items()}), id=name))
    return found


pytestmark = pytest.mark.parametrize("gemm", layers())
ROWS, INPUTS, OUTPUTS = 37, 96, 64
# outputs, inputs: wq_a beside wkv, wq_b; of a TP4 rank shared w2, wo_b, wq_b, w1 beside w3
RELEASED = ((1792, 5120), (32768, 1280), (5120, 576), (5120, 2048), (8192, 1280), (1152, 5120))
FEWER_ROWS = (1, 6, 16, 48, 65, 96, 192, 384, 1000)
needs_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="released shapes are for a GPU")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """New tensors are full of NaN, so that an output that nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(rows: int = ROWS, width: int = INPUTS) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)


def weight(out: int = OUTPUTS, width: int = INPUTS) -> torch.Tensor:
    spread = torch.exp2(torch.randint(-3, 4, (-(-out // 32), width // 32)).float())
    spread = spread.repeat_interleave(32, 0)[:out].repeat_interleave(32, 1)
    return torch.randn(out, width, device=DEVICE) * spread.to(DEVICE)


def check(gemm: Gemm, op: str, got: torch.Tensor, exact: torch.Tensor) -> None:
    """The reference is held to one rounding of ``exact`` (float64), fp32 sums to the noise of their result's format."""
    if gemm._loaded[op].__module__.endswith(".reference"):
        assert torch.equal(got, exact.to(got.dtype))
    else:
        error = (got.double() - exact).norm() / exact.norm()
        assert error < (4e-3 if got.dtype is torch.bfloat16 else 2e-5), f"relative error {error:.2e}"


def test_quantise_input_is_q8_bit_for_bit(gemm: Gemm) -> None:
    """All bf16 exponents, ties, the floor of amax, groups with an infinity or a NaN, and a width beside any tile's."""
    x = inputs(65, 1120)
    x *= (
        torch.exp2(torch.randint(-40, 40, (65, 35), generator=torch.Generator().manual_seed(2)).float())
        .to(x)
        .repeat_interleave(32, 1)
    )
    x[0, :32], x[1, :32], x[2, 5], x[3, 40], x[4, :32], x[5, :32] = (
        0,
        1e-6,
        float("nan"),
        float("inf"),
        3e38,
        448,
    )
    x[6, :32] = torch.arange(32) / 16 + 1
    want = mxfp8.quantise_dequantise(x, dtype=torch.float64)
    torch.testing.assert_close(gemm.quantise_input(x).double(), want, rtol=0, atol=0, equal_nan=True)


def test_lin8_quantises_its_input_and_prepare_fp8_reads_blocks(gemm: Gemm) -> None:
    w = QuantTensor.quantise(weight(), FP8_BLOCK)
    out = gemm.lin8(gemm.quantise_input(inputs()), gemm.prepare_fp8(w))
    exact = mxfp8.quantise_dequantise(inputs()).double() @ w.dequantise().double().T
    check(gemm, "lin8", out, exact)
    plain = inputs().double() @ w.dequantise().double().T
    assert (out.double() - plain).norm() > 1e-2 * plain.norm()


@pytest.mark.parametrize("height", [64, 40])
def test_weights_side_by_side_equal_one_after_the_other(gemm: Gemm, height: int) -> None:
    x = gemm.quantise_input(inputs())
    pair = [QuantTensor.quantise(weight(height), FP8_BLOCK) for _ in range(2)]
    apart = torch.cat([gemm.lin8(x, gemm.prepare_fp8(w)) for w in pair], dim=1)
    assert torch.equal(gemm.lin8(x, gemm.prepare_fp8(*pair)), apart)
    plain = [w.dequantise().bfloat16() for w in pair]
    apart = torch.cat([gemm.linf(inputs(), gemm.prepare_bf16(w)) for w in plain], dim=1)
    assert torch.equal(gemm.linf(inputs(), gemm.prepare_bf16(*plain)), apart)


@pytest.mark.parametrize("width", [32, 96, 1120])
def test_linb_rounds_to_bf16_and_linf_does_not(gemm: Gemm, width: int) -> None:
    w = weight(OUTPUTS + 1, width).bfloat16()
    prepared = gemm.prepare_bf16(w)
    exact = inputs(width=width).double() @ w.double().T
    check(gemm, "linb", gemm.linb(inputs(width=width), prepared), exact)
    check(gemm, "linf", gemm.linf(inputs(width=width), prepared), exact)


def test_linb_grouped_is_block_diagonal_and_prepare_fp8_grouped_splits_rows(gemm: Gemm) -> None:
    w = QuantTensor.quantise(weight(128, 96), FP8_BLOCK)
    x = inputs(ROWS, 2 * 96).unflatten(1, (2, 96))
    out = gemm.linb_grouped(x, gemm.prepare_fp8_grouped(w, groups=2))
    for group, part in enumerate(w.dequantise().double().chunk(2)):
        check(gemm, "linb_grouped", out[:, group], x[:, group].double() @ part.T)


def depends_on_rows(gemm: Gemm) -> bool:
    return gemm._loaded["lin8"].__module__.endswith(".free_order")


@needs_gpu
@pytest.mark.parametrize(("out", "width"), RELEASED)
def test_lin8_at_released_shapes(gemm: Gemm, out: int, width: int) -> None:
    w = QuantTensor.quantise(weight(out, width), FP8_BLOCK)
    prepared, quantised = gemm.prepare_fp8(w), gemm.quantise_input(inputs(1500, width))
    exact = mxfp8.quantise_dequantise(inputs(1500, width)).double() @ w.dequantise().double().T
    whole = gemm.lin8(quantised, prepared)
    check(gemm, "lin8", whole, exact)
    for rows in (
        FEWER_ROWS
    ):  # chunks are added in one place here, and across a cluster or by a second kernel for few rows
        part = gemm.lin8(quantised[:rows], prepared)
        check(gemm, "lin8", part, exact[:rows])
        assert depends_on_rows(gemm) or torch.equal(part, whole[:rows]), rows


@needs_gpu
def test_wo_a_and_the_head_at_released_shapes(gemm: Gemm) -> None:
    w = QuantTensor.quantise(weight(8 * 1024, 4096), FP8_BLOCK)
    prepared, x = gemm.prepare_fp8_grouped(w, groups=8), inputs(1100, 8 * 4096).unflatten(1, (8, 4096))
    exact = torch.einsum("tgi,goi->tgo", x.double(), w.dequantise().double().unflatten(0, (8, 1024)))
    whole = gemm.linb_grouped(x, prepared)
    check(gemm, "linb_grouped", whole, exact)
    head, y = weight(12928, 5120).bfloat16(), inputs(1100, 5120)
    head_prepared = gemm.prepare_bf16(head)
    logits = gemm.linf(y, head_prepared)
    check(gemm, "linf", logits, y.double() @ head.double().T)
    for rows in FEWER_ROWS:
        part, few = gemm.linb_grouped(x[:rows], prepared), gemm.linf(y[:rows], head_prepared)
        check(gemm, "linb_grouped", part, exact[:rows])
        if not depends_on_rows(gemm):
            assert torch.equal(part, whole[:rows]) and torch.equal(few, logits[:rows]), rows


@needs_gpu
def test_a_captured_product_repeats_itself(gemm: Gemm) -> None:
    """Nothing is left over from one replay to the next, and a layer's products may follow one another without a pause."""
    if gemm._loaded["lin8"].__module__.endswith(".reference"):
        pytest.skip("the reference is not captured")
    first, second = (
        gemm.prepare_fp8(QuantTensor.quantise(weight(*shape), FP8_BLOCK))
        for shape in ((1792, 5120), (5120, 1792))
    )
    x = inputs(6, 5120)

    def layer() -> torch.Tensor:
        return gemm.lin8(gemm.quantise_input(gemm.lin8(gemm.quantise_input(x), first)), second)

    want = layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = [layer() for _ in range(4)]
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(one, want) for one in out)


@pytest.mark.parametrize("width", [INPUTS, 2048])
def test_rows_do_not_see_their_neighbours(gemm: Gemm, width: int) -> None:
    """Nor their number: 150 rows take other tiles than one, and add the chunks of a long input in another place."""
    prepared = gemm.prepare_fp8(QuantTensor.quantise(weight(width=width), FP8_BLOCK))
    plain = gemm.prepare_bf16(weight(width=width).bfloat16())

    def lin8(x: torch.Tensor, w: Any) -> torch.Tensor:
        return gemm.lin8(gemm.quantise_input(x), w)

    x = inputs(150, width)
    for op, w in ((lin8, prepared), (gemm.linf, plain)):
        together = op(x, w)
        for rows in ((0, 1), (5, 12), (60, 97), (149, 150), (0, 100)):
            assert torch.equal(op(x[rows[0] : rows[1]], w), together[rows[0] : rows[1]]), rows


def test_one_op_alone_can_be_forced_to_the_reference(gemm: Gemm) -> None:
    """The reference takes what another row's ``prepare_*`` and ``quantise_input`` made."""
    reference = choose_ops(DEVICE, kernels="reference").gemm
    w = QuantTensor.quantise(weight(128, 160), FP8_BLOCK)
    x = gemm.quantise_input(inputs(width=160))
    want = reference.lin8(reference.quantise_input(inputs(width=160)), reference.prepare_fp8(w))
    assert torch.equal(reference.lin8(x, gemm.prepare_fp8(w)), want)
    x = inputs(width=320).unflatten(1, (2, 160))
    want = reference.linb_grouped(x, reference.prepare_fp8_grouped(w, groups=2))
    assert torch.equal(reference.linb_grouped(x, gemm.prepare_fp8_grouped(w, groups=2)), want)


@pytest.mark.parametrize(("heights", "width"), [((64,), 128), ((40, 40), 96), ((320, 96), 1280)])
def test_the_blocks_of_the_cuda_rows_read_back(gemm: Gemm, heights: tuple[int, ...], width: int) -> None:
    """Also where there is no GPU: codes and scales are found again where the kernel looks for them."""
    cuda = pytest.importorskip("flashstep.kernels.gemm.cuda")
    pieces = [QuantTensor.quantise(weight(height, width).cpu(), FP8_BLOCK) for height in heights]
    assert torch.equal(
        cuda.prepare_fp8(*pieces).double(), torch.cat([w.dequantise().double() for w in pieces])
    )
    grouped = QuantTensor.quantise(weight(192, width).cpu(), FP8_BLOCK)
    want = grouped.dequantise().double().unflatten(0, (2, -1)).transpose(1, 2)
    assert torch.equal(cuda.prepare_fp8_grouped(grouped, groups=2).double(), want)
    large = QuantTensor.quantise(weight(64, width).cpu() * 2.0**20, FP8_BLOCK)
    with pytest.raises(ValueError, match="scale of"):
        cuda.prepare_fp8(large)


@pytest.mark.parametrize("plain", [False, True])
def test_linear_knows_the_tiles_that_are_chosen(gemm: Gemm, plain: bool) -> None:
    """Also where there is no GPU: each choice is a case of linear.cu."""
    cuda = pytest.importorskip("flashstep.kernels.gemm.cuda")
    cases = {int(number) for number in re.findall(r"case (\d+):", cuda.SOURCE.read_text())}
    for rows, outputs, groups, chunks in itertools.product(
        (1, 8, 9, 33, 64, 65, 96, 97, 128, 129, 192, 384, 1023), (64, 1792, 32768), (1, 8), (1, 3)
    ):
        tiles = cuda.tiles_of(rows=rows, groups=groups, outputs=outputs, chunks=chunks, plain=plain)
        assert (1000 * tiles.wide if tiles.loop else 0) + tiles.rows in cases


def test_no_rows_give_no_rows(gemm: Gemm) -> None:
    w = gemm.prepare_fp8(QuantTensor.quantise(weight(), FP8_BLOCK))
    assert gemm.lin8(gemm.quantise_input(inputs(0)), w).shape == (0, OUTPUTS)


def test_cost_counts_the_weight_once(gemm: Gemm) -> None:
    one, two = (lin8_cost(rows=r, inputs=5120, outputs=512) for r in (1, 2))
    assert two.flops == 2 * one.flops and two.bytes - one.bytes == 2 * (5120 + 512)
