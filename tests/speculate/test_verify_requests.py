"""``verify`` on whole requests, step after step: the tokens of a seed, the law of a sequence, options, cut drafts, lots."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from flashstep.config.speculative import RejectionSampleMethod
from flashstep.request import SamplingParams
from flashstep.sampling.plain import kept_tokens
from flashstep.sampling.sampler import SampleRow, adjust_, sample
from flashstep.speculate import verify as module
from flashstep.speculate.verify import (
    NO_DRAFT,
    Drafted,
    Verified,
    accept_synthetic,
    acceptance_uniforms,
    draw_drafts,
    verify,
)
from tests.speculate.laws import Chain, chi_square, sequences

STANDARD, BLOCK, SYNTHETIC = (
    RejectionSampleMethod.STANDARD,
    RejectionSampleMethod.BLOCK,
    RejectionSampleMethod.SYNTHETIC,
)
EOS = 1
Propose = Callable[
    [list[list[int]], list[int], int], tuple[Tensor, Tensor | None]
]  # outputs, seeds, k -> drafts, logits


def params(**values) -> SamplingParams:
    return SamplingParams(max_tokens=100, **values)


def row(p: SamplingParams, seed: int, output: Sequence[int], *, allowed: Tensor | None = None) -> SampleRow:
    return SampleRow(
        params=p,
        seed=seed,
        position=len(output),
        prompt=(0, 2),
        output=list(output),
        eos_token_ids=(EOS,),
        allowed_V=allowed,
    )


def logits_of(chain: Chain, histories: Sequence[Sequence[int]]) -> Tensor:
    """fp32 [N, V], at histories of any lengths; the chain looks at the last three tokens only."""
    codes = []
    for history in histories:
        code = 1
        for token in history[-3:]:
            code = code * chain.vocabulary + token
        codes.append(code)
    return chain.table[codes].log().float() + 7.3


def drafted(
    p: SamplingParams, seed: int, output: list[int], drafts: list[int], logits: Tensor | None
) -> Drafted:
    rows = [row(p, seed, [*output, *drafts[:i]]) for i in range(len(drafts) + 1)]
    return Drafted(rows=rows, drafts=drafts, draft_logits_KV=logits)


def step(
    chain: Chain,
    p: SamplingParams,
    seeds: list[int],
    outputs: list[list[int]],
    *,
    k: int,
    propose: Propose,
    **how,
) -> list[Verified]:
    """One step of all requests: drafts, the target's logits, verdicts."""
    drafts_NK, logits_NKV = propose(outputs, seeds, k)
    requests = [
        drafted(p, seed, output, drafts, None if logits_NKV is None else logits_NKV[n])
        for n, (seed, output, drafts) in enumerate(zip(seeds, outputs, drafts_NK.tolist(), strict=True))
    ]
    histories = [r.output for request in requests for r in request.rows]
    return verify(logits_of(chain, histories), requests, **how)


def run(
    chain: Chain, p: SamplingParams, seeds: list[int], *, length: int, **how
) -> tuple[list[list[int]], list[int]]:
    """Outputs of ``length`` tokens, begun by one plain step as after a prefill; and how many drafts stood in each step."""
    first = sample(logits_of(chain, [[]] * len(seeds)), [row(p, seed, []) for seed in seeds])
    outputs, stood = [[token] for token in first], []
    while active := [n for n, output in enumerate(outputs) if len(output) < length]:
        verdicts = step(chain, p, [seeds[n] for n in active], [outputs[n] for n in active], **how)
        for n, verdict in zip(active, verdicts, strict=True):
            assert len(verdict.tokens) == verdict.accepted + 1
            outputs[n] += verdict.tokens
            stood.append(verdict.accepted)
    return [output[:length] for output in outputs], stood


def drawing(
    draft: Chain, temperature: float = 1.0
) -> Callable[[list[list[int]], list[int], int], tuple[Tensor, Tensor]]:
    """Drafts drawn from a chain with the engine's noise."""

    def propose(outputs: list[list[int]], seeds: list[int], k: int) -> tuple[Tensor, Tensor]:
        seeds_N = torch.tensor(seeds)
        newest_N = torch.tensor([len(output) - 1 for output in outputs])
        temperatures_N = torch.full((len(seeds),), temperature)
        drafts, logits = [], []
        histories = [list(output) for output in outputs]
        for offset in range(k):
            logits.append(logits_of(draft, histories))
            drafts.append(
                draw_drafts(logits[-1], temperatures_N, seeds_R=seeds_N, positions_R=newest_N, offset=offset)
            )
            histories = [[*h, t] for h, t in zip(histories, drafts[-1].tolist(), strict=True)]
        return torch.stack(drafts, dim=1), torch.stack(logits, dim=1)

    return propose


def favourites(draft: Chain) -> Propose:
    drawn = drawing(draft, temperature=0.0)
    return lambda outputs, seeds, k: (drawn(outputs, seeds, k)[0], None)


def at_random(vocabulary: int) -> Propose:
    generator = torch.Generator().manual_seed(0)

    def propose(outputs: list[list[int]], seeds: list[int], k: int) -> tuple[Tensor, None]:
        del seeds
        return torch.randint(0, vocabulary, (len(outputs), k), generator=generator), None

    return propose


# ---- the tokens of a seed -------------------------------------------------------------------------------------------------

MIXES = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 4},
    {"temperature": 1.0, "min_p": 0.1, "logit_bias": {3: 2.0}},
    {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    {"temperature": 1.2, "bad_words": ((2, 4), (5,)), "min_tokens": 9},
]


@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("rule", [STANDARD, BLOCK])
def test_proposed_drafts_keep_every_token_of_a_seed(rule: RejectionSampleMethod, mix: dict) -> None:
    """Favourites of a related draft, and random tokens, at every k: the same output as one token a step."""
    chain, draft, p = Chain(6, 3, seed=1), Chain(6, 3, seed=2), params(**mix)
    draft.table = (draft.table + chain.table) / 2
    seeds = [-5, 0, 7, 2**62, 12345]
    alone = [[] for _ in seeds]
    for _ in range(12):
        tokens = sample(logits_of(chain, alone), [row(p, s, o) for s, o in zip(seeds, alone, strict=True)])
        for output, token in zip(alone, tokens, strict=True):
            output.append(token)
    for propose in (favourites(draft), at_random(6)):
        for k in range(1, 6):
            outputs, stood = run(chain, p, seeds, length=12, k=k, propose=propose, rule=rule)
            assert outputs == alone
            assert k < 3 or 0 < sum(stood) < k * len(stood)  # both were seen, standing and falling


def test_greedy_ignores_the_draft_distribution() -> None:
    """Temperature 0 with drawn drafts' logits at hand: still the argmax chain."""
    chain, draft, p = Chain(6, 3, seed=1), Chain(6, 3, seed=2), params(temperature=0.0)
    expected, _ = run(chain, p, [1, 2], length=15, k=1, propose=at_random(6), rule=STANDARD)
    for rule in (STANDARD, BLOCK):
        assert run(chain, p, [1, 2], length=15, k=4, propose=drawing(draft, 0.0), rule=rule)[0] == expected


@pytest.mark.parametrize("rule", [STANDARD, BLOCK])
def test_behind_drafts_that_all_stood_comes_the_token_of_the_seed(rule: RejectionSampleMethod) -> None:
    """Drafts from the target itself always stand, and the one more is what the sampler draws at its position."""
    chain, p = Chain(6, 3, seed=1), params(temperature=0.8)
    drafts_NK, logits_NKV = drawing(chain, 0.8)([[3]] * 50, list(range(50)), 4)
    for seed, drafts in enumerate(drafts_NK.tolist()):
        request = drafted(p, seed, [3], drafts, logits_NKV[seed])
        logits_TV = logits_of(chain, [r.output for r in request.rows])
        (verdict,) = verify(logits_TV, [request], rule=rule)
        assert verdict == Verified(tokens=(*drafts, *sample(logits_TV[4:], [request.rows[4]])), accepted=4)


# ---- the law of a sequence ------------------------------------------------------------------------------------------------


def exact_law(chain: Chain, p: SamplingParams, length: int) -> Tensor:
    """All sequences of ``length`` tokens under the sampler's definition, row by row in plain Python."""
    law = []
    for sequence in sequences(chain.vocabulary, length).tolist():
        probability = 1.0
        for place, token in enumerate(sequence):
            here = row(p, 0, sequence[:place])
            adjusted = logits_of(chain, [sequence[:place]])[0].double()
            adjust_(adjusted, here)
            kept = kept_tokens(adjusted.tolist(), here)
            weights = torch.softmax(adjusted[kept] / p.temperature, dim=0).tolist()
            probability *= dict(zip(kept, weights, strict=True)).get(token, 0.0)
        law.append(probability)
    return torch.tensor(law, dtype=torch.float64)


def counted(outputs: list[list[int]], vocabulary: int) -> Tensor:
    places = [sum(t * vocabulary**i for i, t in enumerate(reversed(output))) for output in outputs]
    return torch.tensor(places).bincount(minlength=vocabulary ** len(outputs[0]))


LAWS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 2},
    {"temperature": 1.0, "frequency_penalty": 0.8, "presence_penalty": 0.3, "repetition_penalty": 1.05},
    {"temperature": 1.3, "min_p": 0.3, "logit_bias": {0: 0.5, 2: -0.5}},
    {"temperature": 1.0, "bad_words": ((0, 0), (2, 1, 2)), "min_tokens": 2},
]


@pytest.mark.parametrize("mix", LAWS, ids=str)
@pytest.mark.parametrize("rule", [STANDARD, BLOCK])
def test_drawn_drafts_keep_the_law(rule: RejectionSampleMethod, mix: dict) -> None:
    """Five tokens over several steps, each with drafts of its own, in one batch of seeds: as the definition has it."""
    chain, draft, p = Chain(3, 3, seed=5), Chain(3, 3, seed=8), params(**mix)
    outputs, stood = run(
        chain, p, list(range(2500)), length=5, k=2, propose=drawing(draft, p.temperature), rule=rule
    )
    statistic, limit = chi_square(counted(outputs, 3), exact_law(chain, p, 5))
    assert statistic < limit
    assert 0.4 < sum(stood) / len(stood) < 1.8


# ---- batches, cuts, grammars ----------------------------------------------------------------------------------------------


def mixed_batch() -> tuple[Tensor, list[Drafted]]:
    """Requests of every kind side by side: other k, temperatures, drawn and proposed drafts, one without any."""
    chain, draft = Chain(6, 3, seed=1), Chain(6, 3, seed=2)
    requests = []
    for n in range(12):
        p = params(temperature=(0.0, 1.0, 0.8)[n % 3], top_k=(0, 3)[n % 2], frequency_penalty=0.1 * n)
        output, k = [n % 6, 3], (n * 5) % 6
        drafts, logits = torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0, 6)
        if k:
            drafts, logits = drawing(draft, p.temperature)([output], [n], k)
        requests.append(drafted(p, n, output, drafts[0].tolist(), None if n % 4 == 0 else logits[0]))
    return logits_of(chain, [r.output for request in requests for r in request.rows]), requests


@pytest.mark.parametrize("rule", [STANDARD, BLOCK, SYNTHETIC])
def test_a_verdict_does_not_depend_on_the_batch(
    rule: RejectionSampleMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_RV, requests = mixed_batch()
    rates = (0.9, 0.7, 0.5, 0.3, 0.2)
    together = verify(logits_RV, requests, rule=rule, acceptance_rates=rates)
    by_request = logits_RV.split([len(request.rows) for request in requests])
    alone = [
        verify(logits, [request], rule=rule, acceptance_rates=rates)[0]
        for logits, request in zip(by_request, requests, strict=True)
    ]
    assert together == alone
    assert len({verdict.accepted for verdict in together}) > 2
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    assert verify(logits_RV, requests, rule=rule, acceptance_rates=rates) == together


def test_nothing_to_verify() -> None:
    for rule in RejectionSampleMethod:
        assert verify(torch.zeros(0, 6), [], rule=rule) == []


@pytest.mark.parametrize("rule", [STANDARD, BLOCK, SYNTHETIC])
@pytest.mark.parametrize("place", range(4))
def test_a_cut_draft_ends_the_run(rule: RejectionSampleMethod, place: int) -> None:
    """Drafts that would all stand; one is cut: those before it stand, and the token in its place is the target's own."""
    chain = Chain(6, 3, seed=1)
    for temperature in (0.0, 1.0):
        p, own = params(temperature=temperature), [3]
        while len(own) < 5:
            own += sample(logits_of(chain, [own]), [row(p, 5, own)])
        cut = [*own[1 : 1 + place], NO_DRAFT, *own[2 + place :]]
        request = Drafted(rows=[row(p, 5, [3, *cut[: min(i, place)]]) for i in range(5)], drafts=cut)
        logits_TV = logits_of(chain, [r.output for r in request.rows])
        (verdict,) = verify(logits_TV, [request], rule=rule, acceptance_rates=(1.0,) * 4)
        assert verdict == Verified(tokens=tuple(own[1 : 2 + place]), accepted=place)


@pytest.mark.parametrize("rule", [STANDARD, BLOCK])
def test_a_grammar_keeps_the_law(rule: RejectionSampleMethod) -> None:
    """What it forbids never comes, and the rest comes as the target has it: a forbidden draft is the last that is verified."""
    chain, draft, p = Chain(6, 3, seed=1), Chain(6, 3, seed=2), params(temperature=1.0)
    allowed = torch.tensor([False, True, False, True, True, False])
    seeds = list(range(3000))
    proposed, logits = drawing(draft)([[3]] * len(seeds), seeds, 3)
    requests = []
    for seed, drafts in zip(seeds, proposed.tolist(), strict=True):
        kept = next((drafts[: i + 1] for i, draft in enumerate(drafts) if not allowed[draft]), drafts)
        rows = [row(p, seed, [3, *kept[:i]], allowed=allowed) for i in range(len(kept) + 1)]
        requests.append(Drafted(rows=rows, drafts=kept, draft_logits_KV=logits[seed]))
    verdicts = verify(logits_of(chain, [r.output for q in requests for r in q.rows]), requests, rule=rule)
    assert {token for verdict in verdicts for token in verdict.tokens} == {1, 3, 4}
    left_V = logits_of(chain, [[3]])[0].masked_fill(~allowed, -torch.inf)
    counts = torch.tensor([verdict.tokens[0] for verdict in verdicts]).bincount(minlength=6)
    statistic, limit = chi_square(counts, torch.softmax(left_V.double(), dim=0))
    assert statistic < limit


def test_lots_take_what_was_proposed() -> None:
    """Synthetic: rates of 1 take every draft however wrong, at temperature 0 too; the last token is still the target's."""
    chain = Chain(6, 3, seed=1)
    for temperature in (0.0, 1.0):
        request = drafted(params(temperature=temperature), 5, [3], [0, 0, 1, 1, 5], None)
        logits_TV = logits_of(chain, [r.output for r in request.rows])
        for rates, count in (((1.0,) * 5, 5), ((1.0, 1.0, 0.0, 0.0, 0.0), 2), ((0.0,) * 5, 0)):
            (verdict,) = verify(logits_TV, [request], rule=SYNTHETIC, acceptance_rates=rates)
            own = sample(logits_TV[count : count + 1], [request.rows[count]])
            assert verdict == Verified(tokens=(*request.drafts[:count], *own), accepted=count)


def test_lots_are_keyed_by_the_newest_token() -> None:
    """Requests at other seeds and positions: each stands as deep as its own numbers say, whichever drafts it has."""
    chain, rates = Chain(6, 3, seed=1), (0.9, 0.7, 0.5, 0.3, 0.2)
    outputs = [[n % 6] * (1 + n % 7) for n in range(60)]
    requests = [drafted(params(), n, output, [0, 1, 2, 3, 4], None) for n, output in enumerate(outputs)]
    verdicts = verify(
        logits_of(chain, [r.output for q in requests for r in q.rows]),
        requests,
        rule=SYNTHETIC,
        acceptance_rates=rates,
    )
    newest_R = torch.tensor([len(output) - 1 for output in outputs])
    numbers = acceptance_uniforms(torch.arange(60), newest_R, count=5)
    assert [verdict.accepted for verdict in verdicts] == accept_synthetic(
        torch.zeros(60, 5, dtype=torch.int64), rates, numbers
    ).tolist()


def test_lots_are_drawn_anew_in_each_step() -> None:
    """3.51 tokens a step through ``verify``, request by request and step by step."""
    chain = Chain(3, 3, seed=1)
    rates = (1.0, 1.0, 0.51, 0.0, 0.0)
    _, stood = run(
        chain,
        params(),
        list(range(40)),
        length=180,
        k=5,
        propose=at_random(3),
        rule=SYNTHETIC,
        acceptance_rates=rates,
    )
    assert set(stood) == {2, 3}
    assert 1 + sum(stood) / len(stood) == pytest.approx(3.51, abs=0.04)
