"""The law of what a step emits is the target's: exactly, by enumeration, and by chi-square (case A09)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashstep.kernels.sampling.philox import Purpose, gumbel, uniforms
from flashstep.request import SamplingParams
from flashstep.sampling.sampler import NEVER, SampleRow, log_probabilities
from flashstep.speculate.depth import CostCurve, CostTable, choose, share, survivals
from flashstep.speculate.verify import (
    NO_DRAFT,
    accept_points,
    block_log_thresholds,
    draft_log_probabilities,
    draw,
    residual,
)
from tests.speculate.laws import DRAFT, TARGET, Chain, accept, chi_square, scales, sequences

TRIALS = 200_000


# ---- the law, exactly -----------------------------------------------------------------------------------------------------


def stop_probabilities(rule: str, drafts_RK: Tensor, log_p_RTV: Tensor, log_q_RKV: Tensor) -> Tensor:
    """fp64 [R, K + 1]: how probable it is that exactly so many drafts stand, over independent uniforms."""
    first_R1 = torch.ones(drafts_RK.shape[0], 1, dtype=torch.float64)
    if rule == "block":
        pass_RK = block_log_thresholds(drafts_RK, log_p_RTV, log_q_RKV).double().exp()
        no_later_RT = torch.cat([(1 - pass_RK).flip(1).cumprod(1).flip(1), first_R1], dim=1)
        return torch.cat([first_R1, pass_RK], dim=1) * no_later_RT
    ids = drafts_RK.clamp(min=0).unsqueeze(2)
    log_ratio_RK = (log_p_RTV[:, :-1].gather(2, ids) - log_q_RKV.gather(2, ids))[..., 0].double()
    ratio_RK = log_ratio_RK.exp().clamp(max=1) * (drafts_RK >= 0)
    before_RT = torch.cat([first_R1, ratio_RK.cumprod(1)], dim=1)
    return before_RT * torch.cat([1 - ratio_RK, first_R1], dim=1)


def error_of_the_law(
    rule: str, target: Chain, draft: Chain, *, width: int, depths: list[int] | None = None
) -> float:
    """How far the law of what a step emits, continued by the target to ``width`` + 1 tokens, is from the target's.

    Every block of drafts and every outcome, with its probability. ``depths`` is how many drafts are verified, block by block, in
    the order of ``sequences``.
    """
    vocabulary, blocks = target.vocabulary, sequences(target.vocabulary, width)
    proposed = draft.law(width)
    log_p = torch.stack([target.rows(blocks[:, :i]) for i in range(width + 1)], dim=1).log().float()
    log_q = torch.stack([draft.rows(blocks[:, :i]) for i in range(width)], dim=1).log().float()
    if depths is not None:
        blocks = blocks.where(torch.arange(width) < torch.tensor(depths).unsqueeze(1), NO_DRAFT)
    stop_RT = stop_probabilities(rule, blocks, log_p, log_q)
    log_scales = scales(blocks, log_p, log_q, block=rule == "block")
    every = sequences(vocabulary, width + 1)
    emitted = torch.zeros(every.shape[0], dtype=torch.float64)
    for accepted in range(width + 1):
        here = (proposed > 0) & (stop_RT[:, accepted] > 0)
        count = torch.full((int(here.sum()),), accepted)
        left = residual(
            blocks[here], log_p[here], log_q[here], count, log_scales_RT=log_scales[here]
        ).double()
        weights_RV = torch.softmax(left, dim=1) * (proposed[here] * stop_RT[here, accepted]).unsqueeze(1)
        rest = torch.ones(every.shape[0], dtype=torch.float64)
        for place in range(accepted + 1, width + 1):
            rest *= target.rows(every[:, :place]).gather(1, every[:, place : place + 1])[:, 0]
        for block, weights in zip(blocks[here], weights_RV, strict=True):
            emitted += (
                (every[:, :accepted] == block[:accepted]).all(dim=1) * weights[every[:, accepted]] * rest
            )
    return float((emitted - target.law(width + 1)).abs().max())


@pytest.mark.parametrize("rule", ["standard", "block"])
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000), zeros=st.sampled_from([0.0, 0.3]), spread=st.sampled_from([0.3, 1.0, 3.0])
)
def test_the_law_of_a_step_is_the_targets(rule: str, seed: int, zeros: float, spread: float) -> None:
    """Three drafts of three tokens. The draft is a chain of its own: behind a wrong draft it goes on in a wrong context."""
    target = Chain(3, 3, seed=seed, zeros=zeros, spread=spread)
    draft = Chain(3, 3, seed=seed + 20_000, zeros=zeros, spread=spread)
    assert error_of_the_law(rule, target, draft, width=3) < 3e-6


NEIGHBOUR = (0.6, 0.3, 0.1)  # survivals of a request that competes for the budget


def confidences(seed: int) -> list[list[float]]:
    """For every block of three drafts: a confidence for each, known from the drafts before it."""
    sure = torch.rand(2 * 3**3, generator=torch.Generator().manual_seed(seed))
    code, blocks = Chain(3, 3, seed=0).code, sequences(3, 3)
    return torch.stack([sure[code(blocks[:, :i])] for i in range(3)], dim=1).tolist()


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_a_budget_shared_by_confidence_keeps_the_law(rule: str) -> None:
    """Drawn drafts, verified as deep as their confidences rank: the law holds, whatever the budget."""
    target, draft = Chain(3, 3, seed=31), Chain(3, 3, seed=32)
    seen = set()
    for seed in range(4):
        for budget in range(1, 6):
            depths = [share([survivals(row), NEIGHBOUR], budget=budget)[0] for row in confidences(seed)]
            seen.add(tuple(sorted(set(depths))))
            assert error_of_the_law(rule, target, draft, width=3, depths=depths) < 3e-6
    assert sum(len(depths) > 1 for depths in seen) >= 2


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_a_budget_must_not_look_at_the_drafts_it_decides_on(rule: str) -> None:
    """Where the costs have steps, the budget of the present confidences moves the law by 3%; one foreseen does not."""
    target, draft = Chain(3, 3, seed=31), Chain(3, 3, seed=32)
    costs = CostTable(
        verify=CostCurve.measured([(2, 1.0), (3, 1.2), (5, 1.6), (8, 1.7)]),
        draft=CostCurve.measured([(2, 0.2)]),
    )
    errors = {}
    for foreseen in (None, ((0.7, 0.5, 0.3), NEIGHBOUR)):
        depths = [
            choose([survivals(row), NEIGHBOUR], costs, other_rows=2, foreseen=foreseen)[0]
            for row in confidences(1)
        ]
        errors[foreseen is None] = error_of_the_law(rule, target, draft, width=3, depths=depths)
    assert errors[False] < 3e-6 and errors[True] == pytest.approx(0.03, abs=0.005)


def test_block_accepts_at_least_as_many() -> None:
    gains = []
    for seed in range(40):
        target, draft = Chain(3, 3, seed=seed), Chain(3, 3, seed=seed + 500)
        blocks, proposed = sequences(3, 3), draft.law(3)
        log_p = torch.stack([target.rows(blocks[:, :i]) for i in range(4)], dim=1).log().float()
        log_q = torch.stack([draft.rows(blocks[:, :i]) for i in range(3)], dim=1).log().float()
        mean = {
            rule: float(
                (proposed * (stop_probabilities(rule, blocks, log_p, log_q) * torch.arange(4)).sum(1)).sum()
            )
            for rule in ("standard", "block")
        }
        gains.append(mean["block"] - mean["standard"])
    assert min(gains) > -1e-6 and sum(gains) / len(gains) > 0.02


# ---- the law, by lot ------------------------------------------------------------------------------------------------------


def target_log_probabilities(**params) -> Tensor:
    """fp32 [8]: the target of case A09 under sampling parameters."""
    row = SampleRow(
        params=SamplingParams(max_tokens=9, **params),
        seed=0,
        position=0,
        prompt=(),
        output=(),
        eos_token_ids=(),
    )
    return log_probabilities(TARGET.log().float().unsqueeze(0), [row])[0]


def one_draft_each(
    log_p_V: Tensor, log_q_V: Tensor, drafts_R: Tensor, rule: str, *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """One draft, one uniform, one draw for each of many requests -> the first tokens emitted, and how many drafts stood."""
    count, vocabulary = drafts_R.shape[0], log_p_V.shape[0]
    log_p_RTV, log_q_RKV = log_p_V.expand(count, 2, -1), log_q_V.expand(count, 1, -1)
    drafts_RK = drafts_R.unsqueeze(1)
    accepted_R = accept(
        rule, drafts_RK, log_p_RTV, log_q_RKV, torch.rand(count, 1, generator=generator).clamp(min=2.0**-33)
    )
    left_RV = residual(
        drafts_RK,
        log_p_RTV,
        log_q_RKV,
        accepted_R,
        log_scales_RT=scales(drafts_RK, log_p_RTV, log_q_RKV, block=rule == "block"),
    )
    noise_RV = -torch.empty(count, vocabulary).exponential_(generator=generator).log()
    return torch.where(accepted_R == 1, drafts_R, draw(left_RV, noise_RV)), accepted_R


OPTIONS = [
    {},
    {"temperature": 0.7},
    {"top_p": 0.9},
    {"top_k": 4},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 4},
]


@pytest.mark.parametrize("params", OPTIONS, ids=str)
@pytest.mark.parametrize("rule", ["points", "standard", "block"])
def test_chi_square(rule: str, params: dict) -> None:
    """Case A09, 200,000 trials: for drawn drafts, and for a drafter that always proposes its favourite."""
    generator = torch.Generator().manual_seed(9)
    log_p_V, log_q_V = target_log_probabilities(**params), DRAFT.log().float()
    if rule == "points":
        drafts_R = torch.full((TRIALS,), int(log_q_V.argmax()))
        targets_R = draw(
            log_p_V.expand(TRIALS, -1), -torch.empty(TRIALS, 8).exponential_(generator=generator).log()
        )
        stands_R = accept_points(drafts_R.unsqueeze(1), torch.stack([targets_R, targets_R], dim=1)) == 1
        assert stands_R.float().mean() == pytest.approx(float(log_p_V.exp()[2]), abs=0.005)
        tokens_R = torch.where(stands_R, drafts_R, targets_R)
    else:
        drafts_R = torch.multinomial(DRAFT, TRIALS, replacement=True, generator=generator)
        tokens_R, _ = one_draft_each(log_p_V, log_q_V, drafts_R, rule, generator=generator)
    statistic, limit = chi_square(tokens_R.bincount(minlength=8), log_p_V.double().exp())
    assert statistic < limit


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_a_point_mass_written_as_q(rule: str) -> None:
    """The ratio rules with q one-hot have the law that ``accept_points`` has without any q."""
    generator = torch.Generator().manual_seed(3)
    log_p_V = target_log_probabilities()
    log_q_V = torch.full((8,), NEVER)
    log_q_V[2] = 0.0
    tokens_R, accepted_R = one_draft_each(
        log_p_V, log_q_V, torch.full((TRIALS,), 2), rule, generator=generator
    )
    statistic, limit = chi_square(tokens_R.bincount(minlength=8), TARGET)
    assert statistic < limit and accepted_R.double().mean() == pytest.approx(0.16, abs=0.005)


def test_chi_square_sees_the_known_mistakes() -> None:
    """The figures of case A09: a rejection that draws from p, and a favourite that is scored as if it had been drawn."""
    generator = torch.Generator().manual_seed(1)
    log_p_V, log_q_V = target_log_probabilities(), DRAFT.log().float()
    drawn_R = torch.multinomial(DRAFT, TRIALS, replacement=True, generator=generator)
    _, accepted_R = one_draft_each(log_p_V, log_q_V, drawn_R, "standard", generator=generator)
    again_R = torch.multinomial(TARGET, TRIALS, replacement=True, generator=generator)
    from_p = torch.where(accepted_R == 1, drawn_R, again_R)
    assert chi_square(from_p.bincount(minlength=8), TARGET)[0] == pytest.approx(27_160, rel=0.05)
    favourite, _ = one_draft_each(log_p_V, log_q_V, torch.full((TRIALS,), 2), "standard", generator=generator)
    assert chi_square(favourite.bincount(minlength=8), TARGET)[0] == pytest.approx(242_229, rel=0.05)


@pytest.mark.parametrize("rounding", [torch.float32, torch.bfloat16])
def test_drafts_are_drawn_from_what_they_are_scored_by(rounding: torch.dtype) -> None:
    """Case A09's dtype slip: logits at +7.3, drawn and scored in fp32 (right), or drawn from bf16 ones (seen at 4e6 trials)."""
    generator = torch.Generator().manual_seed(2)
    logits_V = DRAFT.log().float() + 7.3
    one = torch.ones(1)
    log_p_V, log_q_V = target_log_probabilities(), draft_log_probabilities(logits_V.unsqueeze(0), one)[0]
    drawn_from_V = draft_log_probabilities(logits_V.to(rounding).float().unsqueeze(0), one)[0]
    counts = torch.zeros(8, dtype=torch.int64)
    for _ in range(8):
        noise_RV = -torch.empty(500_000, 8).exponential_(generator=generator).log()
        drafts_R = draw(drawn_from_V.expand(500_000, -1), noise_RV)
        tokens_R, _ = one_draft_each(log_p_V, log_q_V, drafts_R, "standard", generator=generator)
        counts += tokens_R.bincount(minlength=8)
    statistic, limit = chi_square(counts, TARGET)
    assert (statistic < limit) == (rounding is torch.float32)


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_chi_square_of_blocks(rule: str) -> None:
    """Sequences of four tokens: drafts, acceptance and the last token all drawn with the engine's own numbers."""
    count, vocabulary, width = 60_000, 3, 3
    target, draft = Chain(vocabulary, 4, seed=5, spread=1.5), Chain(vocabulary, 4, seed=6, spread=1.5)
    seeds_R = torch.arange(count) * 7919 - 2**40
    newest_R = torch.full((count,), 12)
    drafts_RK = torch.zeros(count, width, dtype=torch.int64)
    for offset in range(width):
        noise_RV = gumbel(
            seeds_R, newest_R, count=vocabulary, purpose=Purpose.DRAFT, offsets_R=torch.full((count,), offset)
        )
        drafts_RK[:, offset] = draw(draft.rows(drafts_RK[:, :offset]).log(), noise_RV)
    log_p_RTV = torch.stack([target.rows(drafts_RK[:, :i]) for i in range(width + 1)], dim=1).log().float()
    log_q_RKV = torch.stack([draft.rows(drafts_RK[:, :i]) for i in range(width)], dim=1).log().float()
    uniforms_RK = uniforms(seeds_R, newest_R, count=width, purpose=Purpose.ACCEPT)
    accepted_R = accept(rule, drafts_RK, log_p_RTV, log_q_RKV, uniforms_RK)
    left_RV = residual(
        drafts_RK,
        log_p_RTV,
        log_q_RKV,
        accepted_R,
        log_scales_RT=scales(drafts_RK, log_p_RTV, log_q_RKV, block=rule == "block"),
    )
    ends_R = draw(left_RV, gumbel(seeds_R, newest_R + 1 + accepted_R, count=vocabulary))
    padded_RT = torch.cat([drafts_RK, torch.zeros(count, 1, dtype=torch.int64)], dim=1)
    padded_RT[torch.arange(count), accepted_R] = ends_R
    whole_RT = target.continued(padded_RT, accepted_R + 1, generator=torch.Generator().manual_seed(1))
    counts = (target.code(whole_RT) - vocabulary**4).bincount(minlength=vocabulary**4)
    statistic, limit = chi_square(counts, target.law(4))
    assert statistic < limit
    assert 0.3 < accepted_R.double().mean() < 2.7  # neither all nor none: the rule had something to decide
