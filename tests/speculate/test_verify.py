"""The rules of acceptance: golden outcomes, the plain twin, edges, and acceptance by lot."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashstep.config.presets import released
from flashstep.config.speculative import SpeculativeOptions, speculation
from flashstep.kernels.sampling.philox import Purpose, uniforms
from flashstep.sampling.sampler import NEVER
from flashstep.speculate import plain
from flashstep.speculate.verify import (
    NO_DRAFT,
    accept_block,
    accept_points,
    accept_standard,
    accept_synthetic,
    acceptance_uniforms,
    block_log_thresholds,
    draft_log_probabilities,
    residual,
)
from tests.speculate.laws import accept, scales

VECTORS = Path(__file__).parents[3] / "shared" / "vectors" / "speculation" / "rejection_cases.npz"
EXCERPT = Path(__file__).parents[1] / "vectors" / "rejection_excerpt.npz"
TRIALS = 200_000


# ---- golden outcomes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [EXCERPT, VECTORS], ids=["excerpt", "all"])
@pytest.mark.parametrize("rule", ["standard", "block"])
def test_golden_outcomes(rule: str, file: Path) -> None:
    """SGLang's kernel: how many drafts stood, and the token it then drew by inverting the distribution function."""
    if not file.exists():
        pytest.skip("the golden vectors are not on this machine")
    recorded = np.load(file)
    cases = sorted({name.split("/")[0] for name in recorded.files if "/" in name})
    assert len(cases) >= 80
    name = {"standard": "token", "block": "block"}[rule]
    for case in cases:
        log_p = torch.tensor(recorded[f"{case}/target_probs"]).log().unsqueeze(0)
        log_q = torch.tensor(recorded[f"{case}/draft_probs"]).log().unsqueeze(0)
        drafts = torch.tensor(recorded[f"{case}/candidates"][1:]).long().unsqueeze(0)
        coins = torch.tensor(recorded[f"{case}/coins"]).double().unsqueeze(0)
        accepted = accept(rule, drafts, log_p, log_q, coins)
        assert int(accepted) == int(recorded[f"{case}/{name}_n"]), case
        left = residual(
            drafts, log_p, log_q, accepted, log_scales_RT=scales(drafts, log_p, log_q, block=rule == "block")
        )
        mass = left[0].double().exp().cumsum(dim=0)
        token = int((mass <= mass[-1] * float(recorded[f"{case}/coin_final"][0])).sum())
        tokens = [*drafts[0, : int(accepted)].tolist(), token]
        assert tokens == recorded[f"{case}/{name}_tokens"].tolist(), case


# ---- the plain twin -------------------------------------------------------------------------------------------------------


def random_case(seed: int, *, rows: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Drafts, log p, log q, uniforms: with impossible tokens, one-hot rows, rows of p = q, and drafts that are absent."""
    generator = np.random.default_rng(seed)
    width, vocabulary = int(generator.integers(1, 6)), int(generator.integers(2, 9))

    def distributions(count: int) -> np.ndarray:
        weights = generator.exponential(size=(rows, count, vocabulary)) ** generator.integers(1, 4)
        weights *= generator.random(weights.shape) > generator.choice([0, 0.3, 0.7])
        weights[..., 0] += weights.sum(-1) == 0
        return weights / weights.sum(-1, keepdims=True)

    p, q = distributions(width + 1), distributions(width)
    same = generator.random((rows, width)) < 0.2
    q[same] = p[:, :-1][same]
    drafts = np.array([[generator.choice(vocabulary, p=row) for row in of_row] for of_row in q])
    foreign = generator.random(drafts.shape) < 0.1  # drafts that q could not have proposed
    drafts[foreign] = generator.integers(0, vocabulary, int(foreign.sum()))
    drafts[generator.random(drafts.shape) < 0.1] = NO_DRAFT
    with np.errstate(divide="ignore"):
        log_p, log_q = torch.tensor(np.log(p)).float(), torch.tensor(np.log(q)).float()
    return torch.tensor(drafts), log_p, log_q, torch.tensor(generator.random(drafts.shape)).clamp(min=1e-9)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_equals_the_plain_twin(seed: int) -> None:
    """Thresholds and residuals to fp32's precision, and the same decisions wherever the uniform is not on the threshold."""
    drafts_RK, log_p_RTV, log_q_RKV, uniforms_RK = random_case(seed)
    log_h_RK = block_log_thresholds(drafts_RK, log_p_RTV, log_q_RKV)
    standing = {
        rule: accept(rule, drafts_RK, log_p_RTV, log_q_RKV, uniforms_RK) for rule in ("standard", "block")
    }
    for r in range(drafts_RK.shape[0]):
        drafts, coins = drafts_RK[r].tolist(), uniforms_RK[r].tolist()
        p, q = log_p_RTV[r].double().exp().tolist(), log_q_RKV[r].double().exp().tolist()
        count = plain.present(drafts)
        thresholds = plain.block_thresholds(drafts, p, q)
        assert log_h_RK[r, :count].exp().tolist() == pytest.approx(thresholds, abs=2e-6)
        assert bool((log_h_RK[r, count:] == NEVER).all())
        ratios = [p[i][d] / q[i][d] if q[i][d] else math.inf for i, d in enumerate(drafts[:count])]
        sharp = {"block": thresholds, "standard": ratios}
        expected = {
            "block": plain.accept_block(drafts, p, q, coins),
            "standard": plain.accept_standard(drafts, p, q, coins),
        }
        for rule, limits in sharp.items():
            if all(abs(u - limit) > 1e-5 for u, limit in zip(coins, limits, strict=False)):
                assert int(standing[rule][r]) == expected[rule]
        for block in (False, True):
            log_scales_RT = scales(drafts_RK, log_p_RTV, log_q_RKV, block=block)
            for accepted in range(count + 1):
                left = plain.residual(drafts, p, q, accepted, block=block)
                one = residual(
                    drafts_RK[r : r + 1],
                    log_p_RTV[r : r + 1],
                    log_q_RKV[r : r + 1],
                    torch.tensor([accepted]),
                    log_scales_RT=log_scales_RT[r : r + 1],
                )
                if not 0 < sum(left) < 1e-5:  # what rounding alone leaves is anybody's
                    assert one[0].exp().tolist() == pytest.approx(left, abs=2e-6)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_points_and_lots_equal_the_plain_twin(seed: int) -> None:
    generator = np.random.default_rng(seed)
    drafts_RK = torch.tensor(generator.integers(NO_DRAFT, 3, size=(20, 5)))
    targets_RT = torch.tensor(generator.integers(NO_DRAFT, 2, size=(20, 6)))  # padding is -1 too
    uniforms_RK = torch.tensor(generator.random((20, 5)))
    rates = sorted(generator.random(5) * (generator.random(5) < 0.8), reverse=True)
    points = [plain.accept_points(d, t) for d, t in zip(drafts_RK.tolist(), targets_RT.tolist(), strict=True)]
    lots = [
        plain.accept_synthetic(d, rates, u)
        for d, u in zip(drafts_RK.tolist(), uniforms_RK.tolist(), strict=True)
    ]
    assert accept_points(drafts_RK, targets_RT).tolist() == points
    assert accept_synthetic(drafts_RK, rates, uniforms_RK).tolist() == lots


# ---- edges ----------------------------------------------------------------------------------------------------------------


def logs(*rows: list[float]) -> Tensor:
    return torch.tensor([rows], dtype=torch.float64).log().float()


def test_equal_distributions_always_stand() -> None:
    log_p, log_q = logs([0.3, 0.7], [0.5, 0.5], [0.9, 0.1]), logs([0.3, 0.7], [0.5, 0.5])
    drafts = torch.tensor([[1, 0]])
    high = torch.full((1, 2), 1 - 2.0**-33, dtype=torch.float64)
    assert block_log_thresholds(drafts, log_p, log_q).tolist() == [[0.0, 0.0]]
    assert (
        accept_standard(drafts, log_p, log_q, high).tolist()
        == accept_block(drafts, log_p, log_q, high).tolist()
        == [2]
    )


def test_impossible_drafts_never_stand_and_never_become_nan() -> None:
    low = torch.full((1, 2), 2.0**-33, dtype=torch.float64)
    log_p, log_q = logs([0.0, 1.0], [0.5, 0.5], [0.5, 0.5]), logs([1.0, 0.0], [0.0, 1.0])
    for drafts in (
        [[0, 0]],
        [[0, 1]],
        [[NO_DRAFT, 0]],
    ):  # the second draft's q may be 0: an infinite ratio behind P = 0
        candidates = torch.tensor(drafts)
        assert not block_log_thresholds(candidates, log_p, log_q).isnan().any()
        assert accept_standard(candidates, log_p, log_q, low).tolist() == [0]
        assert accept_block(candidates, log_p, log_q, low).tolist() == [0]


def test_an_infinite_ratio_stands() -> None:
    """A draft that q could not propose (a point mass of some other drafter, say) stands if p has it; 0 / 0 does not."""
    high = torch.full((1, 1), 1 - 2.0**-33, dtype=torch.float64)
    drafts, log_q = torch.tensor([[0]]), logs([0.0, 1.0])
    for p, count in (([0.1, 0.9], 1), ([0.0, 1.0], 0)):
        for rule in ("standard", "block"):
            assert accept(rule, drafts, logs(p, [0.5, 0.5]), log_q, high).tolist() == [count]


@pytest.mark.parametrize("block", [False, True])
def test_a_residual_of_nothing_is_the_target(block: bool) -> None:
    """p = q, or q a rounding error above p everywhere: what p forbids must not come."""
    log_p = logs([0.25, 0.75, 0.0], [0.2, 0.3, 0.5])
    drafts, none = torch.tensor([[0]]), torch.tensor([0])
    for log_q in (log_p[:, :1], log_p[:, :1] + 1e-7):
        left = residual(drafts, log_p, log_q, none, log_scales_RT=scales(drafts, log_p, log_q, block=block))
        assert torch.equal(left, log_p[:, 0])


def test_a_small_difference_is_not_lost() -> None:
    """p - q of 1e-6 out of 0.5: in fp32 a plain difference would be off by 3%, and by far more in the log of small p."""
    p = torch.tensor([0.5 + 1e-6, 0.5 - 1e-6, 1e-30], dtype=torch.float64)
    q = torch.tensor([0.5, 0.5, 1e-31], dtype=torch.float64)
    log_p, log_q = p.log().float().reshape(1, 1, 3), q.log().float().reshape(1, 1, 3)
    log_p_RTV = torch.cat([log_p, log_p], dim=1)
    left = residual(
        torch.tensor([[1]]), log_p_RTV, log_q, torch.tensor([0]), log_scales_RT=torch.zeros(1, 2)
    )[0]
    exact = log_p[0, 0].double().exp() - log_q[0, 0].double().exp()
    assert left[0].double().exp().item() == pytest.approx(exact[0].item(), rel=1e-6)
    assert left[1] == NEVER
    assert left[2].double().exp().item() == pytest.approx(9e-31, rel=1e-4)


def test_what_drafts_are_drawn_from() -> None:
    """q is the softmax of logits over the request's temperature, in fp32 whatever their offset."""
    logits_RV = torch.tensor([[1.0, 2.0, -3.0], [0.5, 0.5, 4.0]]) + 7.3
    temperatures_R = torch.tensor([0.5, 1.6])
    exact = torch.softmax(logits_RV.double() / temperatures_R.double().unsqueeze(1), dim=1)
    log_q_RV = draft_log_probabilities(logits_RV, temperatures_R)
    assert log_q_RV.dtype == torch.float32 and torch.allclose(log_q_RV.double().exp(), exact, rtol=1e-6)


def test_no_two_verdicts_share_a_number() -> None:
    """Steps behind one another look at the same output positions: each draft of each step has a uniform of its own."""
    newest_R = torch.arange(30)
    numbers = acceptance_uniforms(torch.full((30,), 8), newest_R, count=5)
    assert numbers.unique().numel() == 150


def test_rows_do_not_depend_on_one_another() -> None:
    drafts_RK, log_p_RTV, log_q_RKV, _ = random_case(11, rows=30)
    together = block_log_thresholds(drafts_RK, log_p_RTV, log_q_RKV)
    alone = [
        block_log_thresholds(drafts_RK[r : r + 1], log_p_RTV[r : r + 1], log_q_RKV[r : r + 1])
        for r in range(30)
    ]
    assert torch.equal(together, torch.cat(alone))


# ---- synthetic ------------------------------------------------------------------------------------------------------------


def test_synthetic_length() -> None:
    """3.51 tokens a step: over 100,000 steps of one request, and each draft at its own rate given those before it."""
    options = SpeculativeOptions.parse(
        '{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.51}'
    )
    rates = speculation(options, released()).acceptance_rates
    assert rates == (1, 1, 0.51, 0, 0)
    steps = 100_000
    uniforms_RK = uniforms(torch.full((steps,), 42), torch.arange(steps), count=5, purpose=Purpose.ACCEPT)
    accepted_R = accept_synthetic(torch.zeros(steps, 5, dtype=torch.int64), rates, uniforms_RK)
    assert 1 + accepted_R.double().mean() == pytest.approx(3.51, abs=0.01)


def test_synthetic_rates_are_unconditional() -> None:
    rates, steps = (0.9, 0.6, 0.6, 0.15, 0.0), 100_000
    uniforms_RK = uniforms(torch.full((steps,), -1), torch.arange(steps), count=5, purpose=Purpose.ACCEPT)
    accepted_R = accept_synthetic(torch.zeros(steps, 5, dtype=torch.int64), rates, uniforms_RK)
    measured = [(accepted_R > place).double().mean().item() for place in range(5)]
    assert measured == pytest.approx(rates, abs=0.006)
    assert bool(((accepted_R > 2) == (accepted_R > 1)).all())  # 0.6 after 0.6: never lost between the two
    cut = torch.tensor([[7, NO_DRAFT, 7, 7, 7]]).expand(steps, -1)
    assert accept_synthetic(cut, rates, uniforms_RK).max() == 1
