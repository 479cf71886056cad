"""Router goldens and ties; experts against one row at a time; clamps, weights and the shared expert."""

import pytest
import torch
from torch import Tensor

from flashstep.kernels import choose_ops
from flashstep.kernels.moe import Moe
from flashstep.quant import mxfp8
from flashstep.quant.tensor import MXFP4, QuantTensor
from tests.kernels.implementations import DEVICE, families

pytestmark = pytest.mark.parametrize("moe", families(Moe))
ROWS, WIDTH, INNER, EXPERTS, COUNT, LIMIT = 23, 64, 32, 6, 2, 1.0


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def route(moe: Moe, scores: Tensor, bias: Tensor, *, count: int = COUNT) -> tuple[Tensor, Tensor]:
    """Route rows whose logits are given: the gate is the identity."""
    gate = moe.prepare_gate(torch.eye(scores.shape[1]).bfloat16())
    return moe.route(scores.bfloat16(), gate, bias_E=bias, count=count, scale=1.5, temperature=1.0)


def test_route_reproduces_the_golden_scores(moe: Moe) -> None:
    """spec/model.md 13: x = -2, 0, 1, 3; with all experts chosen the weights are 1.5 s / sum s."""
    golden = torch.tensor([0.35627, 0.83256, 1.14598, 1.74602])
    experts, weights = route(moe, torch.tensor([[-2.0, 0.0, 1.0, 3.0]]), torch.zeros(4), count=4)
    assert experts.tolist() == [[0, 1, 2, 3]]
    torch.testing.assert_close(weights[0], 1.5 * golden / golden.sum(), rtol=0, atol=2e-5)


def test_route_selects_by_the_biased_score_and_weighs_by_the_unbiased(moe: Moe) -> None:
    scores, bias = torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([0.0, 0.0, 0.0, 5.0])
    experts, weights = route(moe, scores, bias)
    assert experts.tolist() == [[0, 3]]
    torch.testing.assert_close(weights, 1.5 * torch.tensor([[1.74602, 0.83256]]) / 2.57858, rtol=0, atol=2e-5)


def test_route_breaks_ties_by_the_lowest_expert_and_stands_large_logits(moe: Moe) -> None:
    assert route(moe, torch.zeros(1, 6), torch.zeros(6))[0].tolist() == [[0, 1]]
    weights = route(moe, torch.tensor([[3e4, 2e4, -3e4, 0.0]]), torch.zeros(4))[1]
    assert torch.isfinite(weights).all() and weights.sum().item() == pytest.approx(1.5)


def test_swiglu_clamps_the_gate_from_above_only(moe: Moe) -> None:
    gate, up = torch.tensor([[5.0, -5.0, 0.5]]).bfloat16(), torch.tensor([[-3.0, 3.0, 0.5]]).bfloat16()
    out = moe.swiglu(torch.cat((gate, up), dim=1), limit=1.0)
    silu = torch.nn.functional.silu(torch.tensor([1.0, -5.0, 0.5]).double())
    assert torch.equal(out[0], (silu * torch.tensor([-1.0, 1.0, 0.5])).bfloat16())


def test_experts_equal_a_row_by_row_twin(moe: Moe) -> None:
    """prepare_experts keeps gate, up and down apart; the weight multiplies before the down projection."""
    w1, w3 = (QuantTensor.quantise(noise(EXPERTS, INNER, WIDTH, seed=s), MXFP4) for s in (1, 2))
    w2 = QuantTensor.quantise(noise(EXPERTS, WIDTH, INNER, seed=3), MXFP4)
    x, shared = noise(ROWS, WIDTH, seed=4).bfloat16(), noise(ROWS, WIDTH, seed=5).bfloat16()
    experts = torch.stack([torch.randperm(EXPERTS)[:COUNT].sort().values for _ in range(ROWS)])
    weights = torch.rand(ROWS, COUNT) + 0.1
    out = moe.experts(
        choose_ops(DEVICE).gemm.quantise_input(x),
        moe.prepare_experts(w1, w3, w2),
        experts_TK=experts,
        weights_TK=weights,
        shared_TD=shared,
        limit=LIMIT,
    )
    gate, up, down = (w.dequantise().double() for w in (w1, w3, w2))
    quantised = mxfp8.quantise_dequantise(x).double()
    for row in range(ROWS):
        total = shared[row].double()
        for expert, weight in zip(experts[row].tolist(), weights[row].double(), strict=True):
            g = (gate[expert] @ quantised[row]).bfloat16().double().clamp(max=LIMIT)
            u = (up[expert] @ quantised[row]).bfloat16().double().clamp(-LIMIT, LIMIT)
            inner = (weight * torch.nn.functional.silu(g) * u).bfloat16()
            total = total + (down[expert] @ mxfp8.quantise_dequantise(inner).double()).bfloat16().double()
        assert torch.equal(out[row], total.bfloat16())
