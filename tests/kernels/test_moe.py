"""Router goldens and ties; experts against one row at a time; clamps, weights and the shared expert."""

from collections.abc import Iterator

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
# rows, width, inner, experts, count: one user at TP1 widths, a TP4 rank's inner width, 48 and 384 rows on few experts
RELEASED = (
    (6, 5120, 2304, 24, 6),
    (6, 5120, 576, 96, 6),
    (48, 5120, 2304, 12, 6),
    (48, 5120, 1056, 24, 6),
    (96, 5120, 2304, 12, 6),
    (384, 5120, 2304, 12, 6),
    (1500, 1024, 2304, 12, 6),
)
ROUTERS = ((384, 6), (128, 3), (512, 10), (128, 8), (64, 8))
# and inner widths; the wider are for kernels that leave narrow layers to others
WIDTHS = ((192, 96), (1024, 1056))
needs_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="released shapes are for a GPU")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """New tensors are full of NaN, so that an output that nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def reference_of(moe: Moe, op: str) -> bool:
    return moe._loaded[op].__module__.endswith(".reference")


def check(moe: Moe, op: str, got: Tensor, want: Tensor) -> None:
    """The reference is held to equality, a row that adds in fp32 to the noise of bf16."""
    if reference_of(moe, op):
        assert torch.equal(got, want)
    else:
        error = (got.double() - want.double()).norm() / want.double().norm()
        assert error < 6e-3, f"relative error {error:.2e}"


def route(
    moe: Moe, scores: Tensor, bias: Tensor, *, count: int = COUNT, scoring: str = "sqrt_softplus"
) -> tuple[Tensor, Tensor]:
    """Route rows whose logits are given: the gate is the identity."""
    gate = moe.prepare_gate(torch.eye(scores.shape[1]).bfloat16().to(DEVICE))
    chosen = moe.route(
        scores.bfloat16().to(DEVICE),
        gate,
        bias_E=bias.to(DEVICE),
        count=count,
        scale=1.5,
        temperature=1.0,
        scoring=scoring,
    )
    return chosen[0].cpu(), chosen[1].cpu()


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
    tied = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, -1.0, 3.0]])
    assert route(moe, tied, torch.zeros(8), count=5)[0].tolist() == [[1, 2, 3, 4, 7]]
    weights = route(moe, torch.tensor([[3e4, 2e4, -3e4, 0.0]]), torch.zeros(4))[1]
    assert torch.isfinite(weights).all() and weights.sum().item() == pytest.approx(1.5)


def test_route_keeps_the_small_scores_of_very_negative_logits(moe: Moe) -> None:
    """softplus(-30) is 9e-14: a plain log(1 + exp) would give 0, and the weights nothing to share."""
    logits = torch.tensor([[-30.0, -32.0, -34.0, -60.0]])
    weights = route(moe, logits, torch.zeros(4))[1]
    want = torch.nn.functional.softplus(logits[0, :2].double()).sqrt()
    torch.testing.assert_close(weights[0], (1.5 * want / want.sum()).float(), rtol=1e-5, atol=0)


def test_route_by_softmax(moe: Moe) -> None:
    logits = noise(9, 64, seed=6).cpu().bfloat16()
    experts, weights = route(moe, logits, torch.zeros(64), count=8, scoring="softmax")
    best = logits.double().softmax(1).gather(1, experts)
    want = logits.double().sort(dim=1, descending=True, stable=True).indices[:, :8].sort(1).values
    assert torch.equal(experts, want)
    torch.testing.assert_close(weights, (1.5 * best / best.sum(1, keepdim=True)).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("rows", [1, 48, 300])
@pytest.mark.parametrize(("experts", "count"), ROUTERS)
def test_route_equals_the_plain_form_on_its_scores(moe: Moe, experts: int, count: int, rows: int) -> None:
    """Scores of neighbouring ranks differ here by more than fp32's noise in a logit, except twins, which are equal."""
    width = 1120
    x, gate = noise(rows, width, seed=7).bfloat16(), (noise(experts, width, seed=8) / 30).bfloat16()
    gate[3], gate[17] = gate[2], gate[16]
    bias = noise(experts, seed=9) / 10
    bias[3], bias[17] = bias[2], bias[16]
    chosen, weights = moe.route(
        x, moe.prepare_gate(gate), bias_E=bias, count=count, scale=1.5, temperature=1.25
    )
    scores = torch.nn.functional.softplus(x.double() @ gate.double().T / 1.25).sqrt()
    biased = (scores.float() + bias).double()
    assert (chosen[:, 1:] > chosen[:, :-1]).all()
    worst_in = biased.gather(1, chosen).amin(1)
    best_out = biased.scatter(1, chosen, float("-inf")).amax(1)
    assert (worst_in >= best_out - 2e-5).all()
    taken = torch.zeros_like(biased, dtype=torch.bool).scatter(1, chosen, True)
    assert not (taken[:, 3] & ~taken[:, 2]).any() and not (taken[:, 17] & ~taken[:, 16]).any()
    best = scores.gather(1, chosen)
    want = 1.5 * best / best.sum(1, keepdim=True)
    torch.testing.assert_close(weights.double(), want, rtol=5e-5, atol=0)


def test_route_of_a_row_is_its_own(moe: Moe) -> None:
    x, gate = noise(200, 1120, seed=7).bfloat16(), (noise(384, 1120, seed=8) / 30).bfloat16()
    prepared = moe.prepare_gate(gate)
    some = {"bias_E": torch.zeros(384, device=DEVICE), "count": 6, "scale": 1.5, "temperature": 1.0}
    together = moe.route(x, prepared, **some)
    for first, last in (
        (0, 1),
        (40, 80),
        (199, 200),
        (8, 13),
        (20, 28),
        (5, 6),
    ):  # one gate, used again and again
        alone = moe.route(x[first:last], prepared, **some)
        assert all(torch.equal(a, t[first:last]) for a, t in zip(alone, together, strict=True))


def test_swiglu_clamps_the_gate_from_above_only(moe: Moe) -> None:
    gate, up = torch.zeros(1, 32).bfloat16(), torch.zeros(1, 32).bfloat16()
    gate[0, :3], up[0, :3] = torch.tensor([5.0, -5.0, 0.5]), torch.tensor([-3.0, 3.0, 0.5])
    out = moe.swiglu(torch.cat((gate, up), dim=1).to(DEVICE), limit=1.0)
    silu = torch.nn.functional.silu(torch.tensor([1.0, -5.0, 0.5]).double())
    want = torch.zeros(1, 32).bfloat16()
    want[0, :3] = (silu * torch.tensor([-1.0, 1.0, 0.5])).bfloat16()
    check(moe, "swiglu", out.cpu().double(), mxfp8.quantise_dequantise(want).double())


@pytest.mark.parametrize("inner", [96, 576, 2304])
def test_swiglu_at_any_width(moe: Moe, inner: int) -> None:
    x = noise(7, 2 * inner, seed=1).bfloat16() * 4
    gate, up = x.double().chunk(2, dim=1)
    want = torch.nn.functional.silu(gate.clamp(max=3.0)) * up.clamp(-3.0, 3.0)
    want = mxfp8.quantise_dequantise(want.bfloat16()).double()
    check(moe, "swiglu", moe.swiglu(x, limit=3.0).double(), want)


def test_a_group_with_a_nan_spoils_itself_only(moe: Moe) -> None:
    x = noise(3, 128, seed=1).bfloat16()
    clean = moe.swiglu(x, limit=3.0).double()
    x[1, 5], x[2, 64 + 40] = float("nan"), float("inf")
    spoilt = moe.swiglu(x, limit=3.0).double()
    assert spoilt[1, :32].isnan().all()
    clean[1, :32] = spoilt[1, :32] = 0
    clean[2, 32:] = spoilt[2, 32:] = 0  # an infinite up is clamped: its group is finite, and another
    assert torch.equal(spoilt, clean)


def stacked(*shape: int, seed: int, binades: int = 6) -> QuantTensor:
    """MXFP4 weights whose scales spread over that many binades and one."""
    spread = torch.randint(
        -binades, 1, (*shape[:-1], shape[-1] // 32), generator=torch.Generator().manual_seed(seed)
    )
    x = noise(*shape, seed=seed) * torch.exp2(spread.float()).to(DEVICE).repeat_interleave(32, -1)
    return QuantTensor.quantise(x, MXFP4)


def layer(width: int, inner: int, experts: int) -> tuple[QuantTensor, QuantTensor, QuantTensor]:
    shapes = ((experts, inner, width), (experts, inner, width), (experts, width, inner))
    return tuple(stacked(*shape, seed=seed) for seed, shape in enumerate(shapes))


def choice(rows: int, experts: int, count: int) -> tuple[Tensor, Tensor]:
    """Different experts a row, ascending, and their weights."""
    generator = torch.Generator().manual_seed(10)
    chosen = [torch.randperm(experts, generator=generator)[:count].sort().values for _ in range(rows)]
    return torch.stack(chosen).to(DEVICE), (torch.rand(rows, count, generator=generator) + 0.1).to(DEVICE)


def run(moe: Moe, x: Tensor, prepared: object, chosen: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
    return moe.experts(
        choose_ops(DEVICE).gemm.quantise_input(x),
        prepared,
        experts_TK=chosen,
        weights_TK=weights,
        shared_TD=shared,
        limit=LIMIT,
    )


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "inner"), [(ROWS, WIDTH, INNER), (1, 96, 160), (70, 128, 64), (21, 1056, 1024)]
)
def test_experts_equal_a_row_by_row_twin(moe: Moe, rows: int, width: int, inner: int, folded: bool) -> None:
    """prepare_experts keeps gate, up and down apart; the weight multiplies before the down projection.

    Folded: some choices are not here (-1), and a row may choose an expert twice, as on an emulated rank.
    """
    w1, w3, w2 = layer(width, inner, EXPERTS)
    x, shared = noise(rows, width, seed=4).bfloat16(), noise(rows, width, seed=5).bfloat16()
    experts, weights = choice(rows, EXPERTS, COUNT)
    if folded:
        experts = experts // 3 - 1
    out = run(moe, x, moe.prepare_experts(w1, w3, w2), experts, weights, shared)
    gate, up, down = (w.dequantise().double() for w in (w1, w3, w2))
    quantised = mxfp8.quantise_dequantise(x).double()
    want = torch.empty_like(out)
    for row in range(rows):
        total = shared[row].double()
        for expert, weight in zip(experts[row].tolist(), weights[row].double(), strict=True):
            if expert < 0:
                continue
            g = (gate[expert] @ quantised[row]).bfloat16().double().clamp(max=LIMIT)
            u = (up[expert] @ quantised[row]).bfloat16().double().clamp(-LIMIT, LIMIT)
            inner_F = (weight * torch.nn.functional.silu(g) * u).bfloat16()
            total = total + (down[expert] @ mxfp8.quantise_dequantise(inner_F).double()).bfloat16().double()
        want[row] = total.bfloat16()
    check(moe, "experts", out, want)


@pytest.mark.parametrize(("width", "inner"), WIDTHS)
def test_experts_of_a_row_are_its_own(moe: Moe, width: int, inner: int) -> None:
    """A row's result does not depend on who shares its experts, nor on how many: 400 rows take larger blocks."""
    prepared = moe.prepare_experts(*layer(width, inner, EXPERTS))
    x, shared = noise(400, width, seed=4).bfloat16(), noise(400, width, seed=5).bfloat16()
    experts, weights = choice(400, EXPERTS, COUNT)
    together = run(moe, x, prepared, experts, weights, shared)
    for rows in (slice(0, 1), slice(20, 60), slice(399, 400)):
        alone = run(moe, x[rows], prepared, experts[rows], weights[rows], shared[rows])
        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize(("width", "inner"), WIDTHS)
def test_experts_of_a_row_of_nan_are_its_own(moe: Moe, width: int, inner: int) -> None:
    prepared = moe.prepare_experts(*layer(width, inner, EXPERTS))
    x, shared = noise(40, width, seed=4).bfloat16(), noise(40, width, seed=5).bfloat16()
    experts, weights = choice(40, EXPERTS, COUNT)
    clean = run(moe, x, prepared, experts, weights, shared)
    x[7] = float("nan")
    spoilt = run(moe, x, prepared, experts, weights, shared)
    assert spoilt[7].isnan().all()
    spoilt[7] = clean[7]
    assert torch.equal(spoilt, clean)


def test_no_choice_of_any_row_is_here(moe: Moe) -> None:
    prepared = moe.prepare_experts(*layer(WIDTH, INNER, EXPERTS))
    x, shared = noise(5, WIDTH, seed=4).bfloat16(), noise(5, WIDTH, seed=5).bfloat16()
    experts, weights = choice(5, EXPERTS, COUNT)
    out = run(moe, x, prepared, torch.full_like(experts, -1), weights, shared)
    assert torch.equal(out, shared)


def test_experts_when_all_rows_choose_the_same(moe: Moe) -> None:
    """One expert takes every row, most take none: the bound on the number of blocks still holds."""
    w1, w3, w2 = layer(WIDTH, INNER, 40)
    prepared = moe.prepare_experts(w1, w3, w2)
    x, shared = noise(50, WIDTH, seed=4).bfloat16(), noise(50, WIDTH, seed=5).bfloat16()
    experts, weights = choice(50, 40, COUNT)
    experts[:, 0], experts[:, 1] = 0, 39
    want = run(
        choose_ops(DEVICE, kernels="reference").moe, x, _reference(w1, w3, w2), experts, weights, shared
    )
    check(moe, "experts", run(moe, x, prepared, experts, weights, shared), want)


@needs_gpu
@pytest.mark.parametrize(("rows", "width", "inner", "experts", "count"), RELEASED)
def test_experts_at_released_shapes(
    moe: Moe, rows: int, width: int, inner: int, experts: int, count: int
) -> None:
    if reference_of(moe, "experts"):
        pytest.skip("the reference is what others are held to")
    w1, w3, w2 = layer(width, inner, experts)
    x, shared = noise(rows, width, seed=4).bfloat16(), noise(rows, width, seed=5).bfloat16()
    chosen, weights = choice(rows, experts, count)
    out = run(moe, x, moe.prepare_experts(w1, w3, w2), chosen, weights, shared)
    plain = choose_ops(DEVICE, kernels="reference").moe
    check(moe, "experts", out, run(plain, x, _reference(w1, w3, w2), chosen, weights, shared))


def test_scales_far_apart(moe: Moe) -> None:
    """Groups of an output whose scales differ by up to 2^40: the small ones may be lost, the large ones may not."""
    w1, w3, w2 = (stacked(*shape, seed=3, binades=40) for shape in (*2 * ((2, 1056, 1024),), (2, 1024, 1056)))
    x, shared = noise(ROWS, 1024, seed=4).bfloat16(), noise(ROWS, 1024, seed=5).bfloat16()
    experts, weights = choice(ROWS, 2, 2)
    want = run(
        choose_ops(DEVICE, kernels="reference").moe, x, _reference(w1, w3, w2), experts, weights, shared
    )
    check(moe, "experts", run(moe, x, moe.prepare_experts(w1, w3, w2), experts, weights, shared), want)


@pytest.mark.parametrize(("width", "inner"), [(160, 96), (1056, 1024)])
def test_experts_alone_can_be_forced_to_the_reference(moe: Moe, width: int, inner: int) -> None:
    """The reference takes what another row's ``prepare_experts`` made."""
    w1, w3, w2 = layer(width, inner, EXPERTS)
    x, shared = noise(ROWS, width, seed=4).bfloat16(), noise(ROWS, width, seed=5).bfloat16()
    experts, weights = choice(ROWS, EXPERTS, COUNT)
    plain = choose_ops(DEVICE, kernels="reference").moe
    want = run(plain, x, _reference(w1, w3, w2), experts, weights, shared)
    assert torch.equal(run(plain, x, moe.prepare_experts(w1, w3, w2), experts, weights, shared), want)


def _reference(w1: QuantTensor, w3: QuantTensor, w2: QuantTensor) -> object:
    return choose_ops(DEVICE, kernels="reference").moe.prepare_experts(w1, w3, w2)
