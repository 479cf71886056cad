"""The proposer: its chain, and that drafts are drawn from the very distribution that they are scored by (case A09)."""

import torch
from torch import Tensor

from flashstep.config.speculative import DraftSampleMethod
from flashstep.model.batch import DraftBatch
from flashstep.model.dspark import DraftBlock
from flashstep.speculate.dspark import Anchor, Proposal, Proposer
from flashstep.speculate.verify import draft_log_probabilities
from tests.speculate.laws import chi_square

VOCABULARY, WIDTH, TEMPERATURE = 5, 3, 0.6
GENERATOR = torch.Generator().manual_seed(3)
BASE_KV = 1.5 * torch.randn(WIDTH, VOCABULARY, generator=GENERATOR)
BIAS_VV = 1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=GENERATOR)


class Table:
    """A draft model of fixed numbers: logits by place, a Markov bias by token, a confidence by place and token before."""

    def propose(self, batch: DraftBatch) -> DraftBlock:
        count = batch.anchor_R.shape[0]
        places_RK1 = torch.arange(float(WIDTH)).expand(count, WIDTH).unsqueeze(2)
        return DraftBlock(logits_RKV=BASE_KV.expand(count, WIDTH, VOCABULARY), hidden_RKD=places_RK1)

    def markov(self, previous_R: Tensor) -> tuple[Tensor, Tensor]:
        return previous_R.float().unsqueeze(1), BIAS_VV[previous_R]

    def chain(self, block: DraftBlock, anchor_R: Tensor, *, places: int) -> Tensor:
        tokens = [anchor_R]
        for place in range(places):
            tokens.append((block.logits_RKV[:, place] + BIAS_VV[tokens[-1]]).argmax(dim=1))
        return torch.stack(tokens[1:], dim=1)

    def confidences(self, block: DraftBlock, anchor_R: Tensor, drafts_RP: Tensor) -> Tensor:
        before_RP = torch.cat((anchor_R.unsqueeze(1), drafts_RP[:, :-1]), dim=1)
        return (10 * block.hidden_RKD[:, : drafts_RP.shape[1], 0] + before_RP.float()) / 100


def propose(method: DraftSampleMethod, anchors: list[Anchor], *, count: int = WIDTH) -> list[Proposal]:
    rows = len(anchors)
    return Proposer(Table(), method=method).propose(
        anchors,
        window_table_RB=torch.zeros(rows, 1, dtype=torch.int64),
        window_start_R=torch.zeros(rows, dtype=torch.int64),
        count=count,
    )


def anchor(token: int, *, seed: int = 0, temperature: float = TEMPERATURE) -> Anchor:
    return Anchor(token=token, position=9, output_position=4, seed=seed, temperature=temperature)


def test_greedy_drafts_are_a_chain() -> None:
    """Each place's logits with the bias of the token before it; the confidence sees that token, not the draft itself."""
    for count in range(1, WIDTH + 1):
        for proposal, first in zip(
            propose(DraftSampleMethod.GREEDY, [anchor(token) for token in range(VOCABULARY)], count=count),
            range(VOCABULARY),
            strict=True,
        ):
            previous, expected, sure = first, [], []
            for place in range(count):
                sure.append((10 * place + previous) / 100)
                previous = int((BASE_KV[place] + BIAS_VV[previous]).argmax())
                expected.append(previous)
            assert proposal.tokens == tuple(expected) and proposal.logits_KV is None
            torch.testing.assert_close(torch.tensor(proposal.confidences), torch.tensor(sure))


def test_drawn_drafts_follow_the_law_that_scores_them() -> None:
    count = 20_000
    proposals = propose(DraftSampleMethod.PROBABILISTIC, [anchor(2, seed=seed) for seed in range(count)])
    tokens_NK = torch.tensor([proposal.tokens for proposal in proposals])
    scored = torch.zeros(VOCABULARY, VOCABULARY, VOCABULARY, dtype=torch.float64)
    q_V = torch.softmax((BASE_KV[0] + BIAS_VV[2]).double() / TEMPERATURE, dim=0)
    for first in range(VOCABULARY):
        q_second_V = torch.softmax((BASE_KV[1] + BIAS_VV[first]).double() / TEMPERATURE, dim=0)
        for second in range(VOCABULARY):
            q_third_V = torch.softmax((BASE_KV[2] + BIAS_VV[second]).double() / TEMPERATURE, dim=0)
            scored[first, second] = q_V[first] * q_second_V[second] * q_third_V
    codes_N = (tokens_NK[:, 0] * VOCABULARY + tokens_NK[:, 1]) * VOCABULARY + tokens_NK[:, 2]
    statistic, limit = chi_square(torch.bincount(codes_N, minlength=VOCABULARY**3), scored.flatten())
    assert statistic < limit
    for proposal in proposals[:20]:  # what verification will score by is that law, given the drafts before
        assert proposal.logits_KV is not None
        temperatures_K = torch.full((WIDTH,), TEMPERATURE, dtype=torch.float64)
        log_q_KV = draft_log_probabilities(proposal.logits_KV, temperatures_K)
        before = (2, *proposal.tokens)
        for place in range(WIDTH):
            expected_V = torch.log_softmax(
                (BASE_KV[place] + BIAS_VV[before[place]]).double() / TEMPERATURE, dim=0
            )
            torch.testing.assert_close(log_q_KV[place].double(), expected_V, atol=1e-5, rtol=0)


def test_drawn_drafts_are_greedy_at_temperature_0() -> None:
    anchors = [anchor(token, temperature=0.0) for token in range(VOCABULARY)]
    assert propose(DraftSampleMethod.PROBABILISTIC, anchors) == propose(DraftSampleMethod.GREEDY, anchors)
