"""Log-probabilities: raw logits, exact ranks, finite values, rows on their own."""

import math

import pytest
import torch

from flashstep.sampling.logprobs import token_logprobs


def plain(logits: list[float], token: int) -> tuple[float, int]:
    total = math.log(sum(math.exp(x) for x in logits))
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    return logits[token] - total, order.index(token) + 1


@pytest.fixture
def logits_RV() -> torch.Tensor:
    values = torch.randn(6, 40, generator=torch.Generator().manual_seed(2)) * 3
    values[2] = 0.0  # all equal
    values[3, 7], values[3, 9] = 0.0, -0.0
    values[4, 5] = values[4, 6] = values[4].max() + 1
    return values


def test_values_and_ranks(logits_RV: torch.Tensor) -> None:
    tokens, counts = [3, 39, 7, 9, 6, 0], [0, 1, 3, 20, 20, 40]
    results = token_logprobs(logits_RV, tokens, counts=counts)
    for row, token, count, result in zip(logits_RV.tolist(), tokens, counts, results, strict=True):
        value, rank = plain(row, token)
        assert (result.token, result.rank) == (token, rank)
        assert result.logprob == pytest.approx(value, abs=1e-6)
        assert [place for _, _, place in result.top] == list(range(1, count + 1))
        for other, logprob, place in result.top:
            assert (pytest.approx(logprob, abs=1e-6), place) == plain(row, other)


def test_more_alternatives_than_tokens(logits_RV: torch.Tensor) -> None:
    (result,) = token_logprobs(logits_RV[:1, :5], [2], counts=[20])
    assert len(result.top) == 5
    assert sum(math.exp(logprob) for _, logprob, _ in result.top) == pytest.approx(1, abs=1e-6)


def test_rows_do_not_depend_on_one_another(logits_RV: torch.Tensor) -> None:
    tokens, counts = [3, 39, 7, 9, 6, 0], [0, 1, 3, 20, 20, 40]
    together = token_logprobs(logits_RV, tokens, counts=counts)
    for row in range(6):
        assert token_logprobs(
            logits_RV[row : row + 1], tokens[row : row + 1], counts=counts[row : row + 1]
        ) == [together[row]]


def test_far_below_is_finite() -> None:
    (result,) = token_logprobs(torch.tensor([[1e4, -1e4, 0.0]]), [1], counts=[3])
    assert result.logprob == -2e4 and result.rank == 3
    assert result.top[0] == (0, 0.0, 1)


def test_nothing() -> None:
    assert token_logprobs(torch.empty(0, 4), [], counts=[]) == []
