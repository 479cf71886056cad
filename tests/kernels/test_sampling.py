"""Tokens from logits: every row of the table against the sampler that is written by its definition, ties and cuts included."""

import random

import pytest
import torch

from flashstep.kernels.sampling import EVERYTHING, Sampling, order, sorted
from flashstep.request import SamplingParams
from flashstep.sampling.plain import kept_tokens, sample_plain
from flashstep.sampling.sampler import SampleRow
from tests.kernels.implementations import DEVICE, families

FAMILIES = families(Sampling)
VOCABULARIES = (1, 5, 64, 1000, 4097, 9000)
PARAMS = [
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=1, temperature=1.0),
    SamplingParams(max_tokens=1, temperature=0.3, top_k=3),
    SamplingParams(max_tokens=1, temperature=1.7, top_p=0.7),
    SamplingParams(max_tokens=1, temperature=1.0, min_p=0.05),
    SamplingParams(max_tokens=1, temperature=0.9, top_k=40, top_p=0.5, min_p=0.01),
    SamplingParams(max_tokens=1, temperature=0.0, top_p=0.5),
    SamplingParams(max_tokens=1, temperature=1.0, top_k=1),
]


def logits(rows: int, vocabulary: int, *, seed: int, ties: bool) -> torch.Tensor:
    x_TV = 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))
    return (x_TV.round() if ties else x_TV).to(DEVICE)


def numbers(params: list[SamplingParams], name: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=DEVICE)


def rows_of(params: list[SamplingParams], seeds: list[int], positions: list[int]) -> list[SampleRow]:
    return [
        SampleRow(params=p, seed=seed, position=position, prompt=(), output=(), eos_token_ids=())
        for p, seed, position in zip(params, seeds, positions, strict=True)
    ]


@pytest.mark.parametrize("rows", [13, 40])  # few, and many
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("ops", FAMILIES)
def test_sample_and_least_kept_are_the_samplers(
    ops: Sampling, vocabulary: int, ties: bool, rows: int
) -> None:
    chance = random.Random(vocabulary)
    params = [*PARAMS, *chance.choices(PARAMS, k=rows - len(PARAMS))]
    seeds = [chance.randrange(-(1 << 63), 1 << 63) for _ in params]
    positions = [chance.randrange(1 << 40) for _ in params]
    x_TV = logits(len(params), vocabulary, seed=vocabulary, ties=ties)
    temperature_T = numbers(params, "temperature", torch.float64)
    least_T = ops.least_kept(
        x_TV,
        temperature_T=temperature_T,
        top_k_T=numbers(params, "top_k", torch.int64),
        top_p_T=numbers(params, "top_p", torch.float64),
        min_p_T=numbers(params, "min_p", torch.float64),
    )
    given = ops.sample(
        x_TV,
        temperature_T=temperature_T,
        seed_T=torch.tensor(seeds, device=DEVICE),
        position_T=torch.tensor(positions, device=DEVICE),
        least_T=least_T,
    )
    plain = rows_of(params, seeds, positions)
    assert given.tolist() == [sample_plain(x_V.cpu(), row) for x_V, row in zip(x_TV, plain, strict=True)]
    kept_TV = (order(x_TV) >= least_T.unsqueeze(1)).cpu()
    for row, x_V, kept_V in zip(plain, x_TV.cpu(), kept_TV, strict=True):
        if row.params.temperature > 0:
            assert kept_V.nonzero().flatten().tolist() == sorted_list(kept_tokens(x_V.double().tolist(), row))
        else:
            assert kept_V.all()


def sorted_list(tokens: list[int]) -> list[int]:
    return torch.tensor(tokens).sort().values.tolist()


@pytest.mark.parametrize("ops", FAMILIES)
def test_without_cuts_every_token_may_come(ops: Sampling) -> None:
    """Ten thousand draws of eight tokens follow their probabilities; none depends on the rows beside it."""
    count, vocabulary = 10_000, 8
    x_TV = logits(1, vocabulary, seed=1, ties=False).expand(count, -1).contiguous()
    given = ops.sample(
        x_TV,
        temperature_T=torch.full((count,), 2.0, dtype=torch.float64, device=DEVICE),
        seed_T=torch.arange(count, device=DEVICE),
        position_T=torch.zeros(count, dtype=torch.int64, device=DEVICE),
    )
    shares = given.bincount(minlength=vocabulary).double() / count
    assert (shares - torch.softmax(x_TV[0].double() / 2, dim=0)).abs().max() < 0.02
    alone = ops.sample(
        x_TV[:1],
        temperature_T=torch.full((1,), 2.0, dtype=torch.float64, device=DEVICE),
        seed_T=torch.tensor([77], device=DEVICE),
        position_T=torch.tensor([0], device=DEVICE),
    )
    assert alone.tolist() == [int(given[77])]


@pytest.mark.parametrize("requests", [1, 3, 17, 70])
@pytest.mark.parametrize("vocabulary", [64, 1000, 20_000])
@pytest.mark.parametrize("ops", FAMILIES)
def test_a_chain_is_the_best_token_of_each_place(ops: Sampling, vocabulary: int, requests: int) -> None:
    """Logits in steps of an eighth and small whole weights: sums are exact, and many are equal."""
    generator = torch.Generator().manual_seed(vocabulary + requests)
    places, rank = 5, 64
    logits_RKV = (torch.randn(requests, places, vocabulary, generator=generator) * 8).round() / 8
    embedding_VM = torch.randint(-2, 3, (vocabulary, rank), generator=generator).bfloat16()
    weight_VM = torch.randint(-2, 3, (vocabulary, rank), generator=generator).bfloat16()
    anchor_R = torch.randint(vocabulary, (requests,), generator=generator)
    expected, previous_R = [], anchor_R
    for place in range(places):
        bias_RV = embedding_VM[previous_R].float() @ weight_VM.float().T
        previous_R = (logits_RKV[:, place] + bias_RV).argmax(dim=1)
        expected.append(previous_R)
    for count in (places, 2):
        given = ops.chain(
            logits_RKV.to(DEVICE),
            anchor_R=anchor_R.to(DEVICE),
            embedding_VM=embedding_VM.to(DEVICE),
            weight=weight_VM.repeat(1, 2).to(DEVICE)[:, :rank],  # rows lie apart, as prepared ones may
            places=count,
        )
        assert torch.equal(given.cpu(), torch.stack(expected[:count], dim=1))


def test_sorting_whole_rows_gives_the_references_cut() -> None:
    """``sorted`` is the row that CUDA devices take; torch runs it anywhere."""
    (reference, *_) = (param.values[0] for param in FAMILIES[-1:])
    x_TV = logits(len(PARAMS), 300, seed=9, ties=True)
    columns = {
        "temperature_T": numbers(PARAMS, "temperature", torch.float64),
        "top_k_T": numbers(PARAMS, "top_k", torch.int64),
        "top_p_T": numbers(PARAMS, "top_p", torch.float64),
        "min_p_T": numbers(PARAMS, "min_p", torch.float64),
    }
    assert torch.equal(sorted.least_kept(x_TV, **columns), reference.least_kept(x_TV, **columns))


def test_order_is_total() -> None:
    x_TV = torch.tensor([[0.0, -0.0, 1.0, -1.0, 1.0, -torch.inf, torch.inf, 1e-40]])
    assert order(x_TV)[0].argsort(descending=True).tolist() == [6, 2, 4, 7, 0, 1, 3, 5]
    assert order(x_TV).min() > EVERYTHING
