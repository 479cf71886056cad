"""The sampler: against its plain twin, against chi-square, and the cases A14, A22, A24 and A25."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashstep.kernels.sampling.philox import gumbel
from flashstep.request import SamplingParams
from flashstep.sampling import sampler
from flashstep.sampling.plain import kept_tokens, sample_plain
from flashstep.sampling.sampler import SampleRow, adjust_, log_probabilities, probabilities, sample

VOCABULARY = 24
EOS = 1


def row(
    seed: int = 0, position: int | None = None, *, prompt=(), output=(), eos=(EOS,), **params
) -> SampleRow:
    return SampleRow(
        params=SamplingParams(**({"max_tokens": 1000} | params)),
        seed=seed,
        position=len(output) if position is None else position,
        prompt=prompt,
        output=output,
        eos_token_ids=eos,
    )


def logits(rows: int, seed: int = 0, *, vocabulary: int = VOCABULARY, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    keep = expected > 0
    return float(((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum())


def draw_many(logits_V: torch.Tensor, count: int, **params) -> torch.Tensor:
    """How often each token comes at ``count`` positions of one seed."""
    rows = [row(123, position, **params) for position in range(count)]
    tokens = sample(logits_V.expand(count, -1), rows)
    return torch.tensor(tokens).bincount(minlength=logits_V.numel()).double()


# ---- distribution --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 6},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.7, "top_k": 10, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 1.0, "logit_bias": {3: 2.0, 7: -100.0}},
    ],
)
def test_chi_square(params: dict) -> None:
    """Drawn frequencies against the definition, worked out in plain Python."""
    logits_V = logits(1, 3)[0]
    adjusted = logits_V.double()
    adjust_(adjusted, row(**params))
    kept = kept_tokens(adjusted.tolist(), row(**params))
    weights = torch.zeros(VOCABULARY, dtype=torch.float64)
    weights[kept] = torch.exp(adjusted[kept] / params["temperature"])
    expected = weights / weights.sum()
    assert torch.allclose(
        probabilities(adjusted.unsqueeze(0), [SamplingParams(max_tokens=1, **params)])[0], expected
    )
    count = 20_000
    counts = draw_many(logits_V, count, **params)
    assert counts[expected == 0].sum() == 0
    degrees = len(kept) - 1
    # Wilson and Hilferty's approximation of the 0.9999 quantile
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3
    assert chi_square(counts, expected * count) < limit


def test_top_p_keeps_the_token_that_crosses() -> None:
    adjusted = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64))
    for top_p, kept in ((1e-9, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4), (1.0, 4)):
        found = probabilities(adjusted, [SamplingParams(max_tokens=1, top_p=top_p)])
        assert int((found > 0).sum()) == kept, top_p


def test_top_k_then_top_p() -> None:
    """top-p works on what top-k left, renormalised: 0.5 / 0.8 alone reaches 0.6."""
    adjusted = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64))
    found = probabilities(adjusted, [SamplingParams(max_tokens=1, top_k=2, top_p=0.6)])
    assert torch.allclose(found, torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64))


def test_equal_logits_are_cut_by_id() -> None:
    found = probabilities(torch.zeros(1, 8, dtype=torch.float64), [SamplingParams(max_tokens=1, top_k=3)])
    assert found.nonzero()[:, 1].tolist() == [0, 1, 2]
    assert sample(torch.zeros(1, 8), [row(temperature=0)]) == [0]


# ---- the plain twin ------------------------------------------------------------------------------------------------------

TOKENS = st.integers(0, VOCABULARY - 1)
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-4, 0.7, 1.0, 1.9]),
        "top_k": st.sampled_from([-1, 0, 1, 3, VOCABULARY, 500]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.01]),
        "min_p": st.sampled_from([0.0, 0.05, 0.9]),
        "presence_penalty": st.sampled_from([0.0, 1.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.3, -0.3]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7]),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, -2.5, 0.0, 1.25, 100.0]), max_size=3),
        "bad_words": st.lists(st.lists(TOKENS, min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
        "stop_token_ids": st.lists(TOKENS, max_size=2).map(tuple),
        "min_tokens": st.sampled_from([0, 3]),
    }
)
ROWS = st.builds(
    lambda params, seed, prompt, output: row(seed, prompt=prompt, output=output, **params),
    PARAMS,
    st.integers(-(2**63), 2**63 - 1),
    st.lists(TOKENS, max_size=5),
    st.lists(TOKENS, max_size=6),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=6), st.integers(0, 10**6), st.sampled_from([0.0, 0.1, 3.0]))
def test_batched_is_plain_and_alone(rows: list[SampleRow], seed: int, scale: float) -> None:
    given_RV = logits(len(rows), seed, scale=scale)
    kept = given_RV.clone()
    tokens = sample(given_RV, rows)
    assert torch.equal(given_RV, kept), "the logits were changed"
    for index, one in enumerate(rows):
        assert sample(given_RV[index : index + 1], [one]) == [tokens[index]]
        assert sample_plain(given_RV[index], one) == tokens[index]


def test_pieces_of_a_batch_are_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_RV = logits(7, seed=4)
    rows = [row(seed=n, position=n, temperature=float(n % 3)) for n in range(7)]
    whole = sample(logits_RV, rows)
    for count in (1, 3):
        monkeypatch.setattr(sampler, "CHUNK_BYTES", 8 * VOCABULARY * count)
        assert sample(logits_RV, rows) == whole


def test_no_rows() -> None:
    assert sample(torch.empty(0, 8), []) == []


# ---- processors ----------------------------------------------------------------------------------------------------------


def adjusted(logits_V: torch.Tensor, one: SampleRow) -> torch.Tensor:
    result = logits_V.double()
    adjust_(result, one)
    return result


def test_penalties() -> None:
    base = torch.tensor([1.0, -1.0, 2.0, 0.5])
    one = row(
        prompt=(1,),
        output=(2, 2, 0),
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=1.0,
        eos=(),
    )
    assert adjusted(base, one).tolist() == [
        0.5 - 1.25,
        -2.0,
        1.0 - 1.5,
        0.5,
    ]  # repetition counts the prompt too


def test_bad_words() -> None:
    words = ((3,), (4, 5), (4, 6, 7))

    def banned(output) -> list[int]:
        return (
            torch.isinf(adjusted(torch.zeros(10), row(output=output, bad_words=words)))
            .nonzero()
            .flatten()
            .tolist()
        )

    assert banned(()) == [3]
    assert banned((9, 4)) == [3, 5]
    assert banned((4, 6)) == [3, 7]
    assert banned((4, 6, 8)) == [3]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_masks_eos_and_stops_and_nothing_else(ignore_eos: bool) -> None:
    """A24: outputs are counted, not the prompt; every EOS id counts; the last id stays reachable."""
    one = {"prompt": (5,) * 40, "min_tokens": 10, "stop_token_ids": (7,), "ignore_eos": ignore_eos}
    eos = (1, 2)
    early = adjusted(torch.zeros(VOCABULARY), row(output=(5,) * 9, eos=eos, **one))
    assert torch.isinf(early).nonzero().flatten().tolist() == [1, 2, 7]
    assert not torch.isinf(adjusted(torch.zeros(VOCABULARY), row(output=(5,) * 10, eos=eos, **one))).any()
    best_is_last = torch.zeros(1, VOCABULARY)
    best_is_last[0, -1] = 5
    assert sample(best_is_last, [row(eos=eos, temperature=0, **one)]) == [VOCABULARY - 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logit_bias(temperature: float) -> None:
    """A22: +100 chooses, -100 never comes in 500 draws, and neighbours are as they were."""
    base = logits(1, 4)[0]
    last = VOCABULARY - 1
    for target in (5, last):
        assert sample(base[None], [row(temperature=temperature, logit_bias={target: 100.0})]) == [target]
    counts = draw_many(base, 500, temperature=1.0, logit_bias={5: -100.0})
    assert counts[5] == 0
    neighbours = [row(seed, temperature=1.0) for seed in range(4)]
    alone = sample(base.expand(4, -1), neighbours)
    mixed = sample(
        base.expand(6, -1), [row(logit_bias={5: 100.0}), *neighbours, row(logit_bias={last: -100.0})]
    )
    assert mixed[1:5] == alone


def test_everything_banned_still_gives_a_token() -> None:
    words = tuple((token,) for token in range(VOCABULARY))
    rows = [row(temperature=t, bad_words=words, top_p=0.9, min_p=0.1) for t in (0.0, 1.0)]
    assert all(0 <= token < VOCABULARY for token in sample(logits(2), rows))


def test_extreme_temperatures_are_finite() -> None:
    base = logits(1, 8)
    assert sample(base, [row(temperature=1e-300)]) == [int(base.argmax())]
    counts = draw_many(base[0], 3000, temperature=1e12)
    assert counts.min() > 60  # all but uniform


# ---- seeds (A14, A25) ------------------------------------------------------------------------------------------------------


def test_seeds_give_the_same_tokens_whatever_stands_beside() -> None:
    flat = logits(1, 9, scale=0.1).expand(5, -1)
    target = row(42, position=6)
    alone = sample(flat[:1], [target])
    for place in range(5):
        others = [row(seed, position=seed, temperature=0.3 * (seed % 3), top_k=seed) for seed in range(4)]
        rows = [*others[:place], target, *others[place:]]
        assert sample(flat, rows)[place] == alone[0]


def test_seeds_differ() -> None:
    flat = torch.zeros(1, 512)

    def text(seed: int) -> tuple[int, ...]:
        return tuple(sample(flat.expand(16, -1), [row(seed, position) for position in range(16)]))

    assert text(7) == text(7)
    assert len({text(seed) for seed in range(1, 21)}) == 20
    assert len({text(seed) for seed in (1, 1 + 2**32, 1 - 2**63, -1)}) == 4  # all 64 bits of a seed count


# ---- what verification reads ----------------------------------------------------------------------------------------------


def test_log_probabilities_are_what_sample_draws_from() -> None:
    """Row by row the definition's distribution, rounded once; and drawing from it with the sampler's noise gives its tokens."""
    rows = [
        row(n, output=(5, 7, 5), prompt=(2,), temperature=0.6 + 0.1 * n, **params)
        for n, params in enumerate(
            [
                {},
                {"top_k": 5, "top_p": 0.8},
                {"min_p": 0.2, "logit_bias": {3: 4.0}},
                {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.4},
                {"bad_words": ((7, 5, 9), (2,)), "min_tokens": 6, "stop_token_ids": (8,)},
            ]
        )
    ]
    logits_RV = logits(len(rows), 6)
    log_p_RV = log_probabilities(logits_RV, rows)
    assert log_p_RV.dtype == torch.float32
    for log_p_V, logits_V, one in zip(log_p_RV, logits_RV, rows, strict=True):
        adjusted = logits_V.double()
        adjust_(adjusted, one)
        kept = kept_tokens(adjusted.tolist(), one)
        assert sorted(kept) == log_p_V.isfinite().nonzero().flatten().tolist()
        assert torch.allclose(
            log_p_V[kept].double(),
            torch.log_softmax(adjusted[kept] / one.params.temperature, dim=0),
            atol=1e-6,
        )
    seeds, positions = torch.tensor([r.seed for r in rows]), torch.tensor([r.position for r in rows])
    assert (log_p_RV + gumbel(seeds, positions, count=VOCABULARY)).argmax(dim=1).tolist() == sample(
        logits_RV, rows
    )


def test_nothing_possible_is_not_nan() -> None:
    nothing = torch.zeros(VOCABULARY, dtype=torch.bool)
    one = dataclasses.replace(row(), allowed_V=nothing)
    assert torch.equal(log_probabilities(logits(1), [one]), torch.full((1, VOCABULARY), -math.inf))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_grammar_leaves(temperature: float) -> None:
    """Its ban holds against any bias, and the rest is drawn as if the others did not exist."""
    allowed = torch.zeros(VOCABULARY, dtype=torch.bool)
    allowed[[3, 4, 9]] = True
    params = {"temperature": temperature, "logit_bias": {5: 100.0}}
    logits_V = logits(1, 2)
    for position in range(50):
        (token,) = sample(logits_V, [dataclasses.replace(row(1, position, **params), allowed_V=allowed)])
        only = torch.full_like(logits_V, -math.inf)
        only[:, [3, 4, 9]] = logits_V[:, [3, 4, 9]]
        assert [token] == sample(only, [row(1, position, **params)])
