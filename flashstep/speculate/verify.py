"""Accept or reject: which drafts stand, and the token that ends a step. The one place of these rules (spec/model.md 8.6).

Takes target logits with each row's parameters, drafts, and the draft logits if drafts were drawn; gives tokens. Everything is in
log space: fp32 log-probabilities, differences by expm1, sums over the vocabulary in fp64. ``plain.py`` says the same number by
number. Knows no model, cache or plan. Suffixes: R requests, K drafts of one, T = K + 1 target rows of one, V vocabulary.

Drafts [R, K] are token ids, -1 where there is none: it and all behind it are rejected. Target row i of a request follows draft i
(row 0: its newest token), so p of draft i + 1 is in row i, as is q.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.config.speculative import RejectionSampleMethod
from flashstep.kernels.sampling.philox import Purpose, gumbel, uniforms
from flashstep.sampling.sampler import NEVER, SampleRow, log_probabilities, sample

NO_DRAFT = -1
CHUNK_BYTES = 1 << 30  # of fp32 target log-probabilities worked on at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafted:
    """One request in a step: ``rows`` of its newest token and of each draft, in order, and the drafts themselves.

    ``draft_logits_KV`` fp32 [>= K, V], before temperature, where the drafts were drawn from them (``draw_drafts``); None where
    each draft was simply proposed (a point mass). What a draft IS must not decide whether it is verified, if it was drawn: one
    that a constraint forbids is left in, as the last; p = 0 rejects it, and what p leaves of q takes its place. Point masses may
    be cut at will (or be -1).
    """

    rows: Sequence[SampleRow]
    drafts: Sequence[int]
    draft_logits_KV: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """The tokens of a step: the first ``accepted`` drafts, and one more."""

    tokens: tuple[int, ...]
    accepted: int


def verify(
    logits_RV: Tensor,
    requests: Sequence[Drafted],
    *,
    rule: RejectionSampleMethod,
    acceptance_rates: Sequence[float] = (),
) -> list[Verified]:
    """fp32 target logits of all requests' rows, in order -> one verdict a request.

    Drawn drafts at temperatures above 0 are judged by ``rule``; point masses, and all at temperature 0, by equality with what the
    sampler draws, which is both rules for such drafts and keeps every seed's tokens. Synthetic judges all by lot.
    """
    assert logits_RV.shape[0] == sum(len(request.rows) for request in requests)
    assert all(len(request.rows) == len(request.drafts) + 1 for request in requests)
    blocks = list(zip(logits_RV.split([len(request.rows) for request in requests]), requests, strict=True))
    if rule is RejectionSampleMethod.SYNTHETIC:
        return _by_lot(blocks, acceptance_rates)
    drawn = [index for index, request in enumerate(requests) if _is_drawn(request)]
    points = [index for index, request in enumerate(requests) if not _is_drawn(request)]
    verdicts = dict(zip(points, _by_equality([blocks[index] for index in points]), strict=True))
    for chunk in _chunks(drawn, requests, vocabulary=logits_RV.shape[1]):
        verdicts |= zip(chunk, _by_ratio([blocks[index] for index in chunk], rule), strict=True)
    return [verdicts[index] for index in range(len(requests))]


# ---- drawing ------------------------------------------------------------------------------------------------------------


def draft_log_probabilities(logits_RV: Tensor, temperatures_R: Tensor) -> Tensor:
    """Draft logits [R, V] and temperatures above 0 [R] -> fp32 [R, V], log q: the law drafts are drawn from AND scored by."""
    return torch.log_softmax(logits_RV.double() / temperatures_R.double().unsqueeze(1), dim=1).float()


def draw_drafts(
    logits_RV: Tensor, temperatures_R: Tensor, *, seeds_R: Tensor, positions_R: Tensor, offset: int
) -> Tensor:
    """Draft number ``offset`` (from 0) of each request -> int64 [R]; the largest where the temperature is 0.

    ``positions_R`` are the output positions of the requests' newest tokens, those that all drafts of this block stand behind.
    """
    warm_R = temperatures_R > 0
    log_q_RV = draft_log_probabilities(logits_RV, temperatures_R.where(warm_R, 1.0))
    noise_RV = gumbel(
        seeds_R,
        positions_R,
        count=logits_RV.shape[1],
        purpose=Purpose.DRAFT,
        offsets_R=torch.full_like(seeds_R, offset),
    )
    return torch.where(warm_R, draw(log_q_RV, noise_RV), logits_RV.argmax(dim=1))


def acceptance_uniforms(seeds_R: Tensor, positions_R: Tensor, *, count: int) -> Tensor:
    """fp64 [R, count], one a draft; ``positions_R`` are the output positions of the requests' newest tokens, as in drawing.

    Not keyed by the drafts' own positions: the block rule looks behind the cut, and the next step comes to these positions again.
    """
    return uniforms(seeds_R, positions_R, count=count, purpose=Purpose.ACCEPT)


def draw(log_weights_RV: Tensor, noise_RV: Tensor) -> Tensor:
    """Log weights [R, V], which need not sum to 1, and standard Gumbel noise -> int64 [R] (Gumbel-max)."""
    return (log_weights_RV + noise_RV).argmax(dim=1)


# ---- the rules ------------------------------------------------------------------------------------------------------------


def accept_points(drafts_RK: Tensor, targets_RT: Tensor) -> Tensor:
    """Drafts and the tokens that the sampler drew in each row, int64 -> how many stand, int64 [R]: the leading equal ones.

    The standard rule with q = 1 at d accepts with p(d) and else draws from p without d. A token drawn from p is d with p(d), and
    otherwise follows p without d: the same law, with the sampler's own noise. The block rule has it too: there P_i is the product
    of the p(d_j), S_i = P_i (1 - p(d_{i+1})), and the accepted length is at least i with probability P_i (Sun et al. 2024).
    """
    return _leading((drafts_RK == targets_RT[:, :-1]) & (drafts_RK >= 0))


def accept_standard(drafts_RK: Tensor, log_p_RTV: Tensor, log_q_RKV: Tensor, uniforms_RK: Tensor) -> Tensor:
    """Leading drafts with u q(d) < p(d) -> int64 [R] (8.6 standard; Leviathan et al. 2023, Chen et al. 2023)."""
    log_ratio_RK = _log_ratio(drafts_RK, log_p_RTV, log_q_RKV)
    return _leading((uniforms_RK.log() < log_ratio_RK) & (drafts_RK >= 0))


def accept_block(drafts_RK: Tensor, log_p_RTV: Tensor, log_q_RKV: Tensor, uniforms_RK: Tensor) -> Tensor:
    """The largest i with u_i <= h_i -> int64 [R] (8.6 block; Sun et al. 2024): an earlier failure does not stop the walk.

    The uniforms are independent, one a draft.
    """
    log_h_RK = block_log_thresholds(drafts_RK, log_p_RTV, log_q_RKV)
    places_K = torch.arange(1, drafts_RK.shape[1] + 1, device=drafts_RK.device)
    passed_RK = uniforms_RK.log() <= log_h_RK
    return torch.cat([torch.zeros_like(drafts_RK[:, :1]), places_K * passed_RK], dim=1).amax(dim=1)


def accept_synthetic(drafts_RK: Tensor, rates: Sequence[float], uniforms_RK: Tensor) -> Tensor:
    """Leading drafts with u_i < rate_i / rate_{i-1}, rate_0 = 1 -> int64 [R] (8.6 synthetic), whatever the drafts are."""
    before = [1.0, *rates]
    conditional = [rate / last if last > 0 else 0.0 for last, rate in zip(before, rates, strict=False)]
    rates_K = uniforms_RK.new_tensor(conditional[: drafts_RK.shape[1]])
    return _leading((uniforms_RK < rates_K) & (drafts_RK >= 0))


def block_log_scales(drafts_RK: Tensor, log_p_RTV: Tensor, log_q_RKV: Tensor) -> Tensor:
    """fp32 [R, K + 1]: log P_i, with P_0 = 1, P_i = min(1, P_{i-1} p(d_i) / q(d_i))."""
    log_ratio_RK = _log_ratio(drafts_RK, log_p_RTV, log_q_RKV)
    scales = [torch.zeros_like(log_p_RTV[:, 0, 0])]
    for log_ratio_R in log_ratio_RK.unbind(dim=1):
        # an impossible draft stays impossible: -inf + inf (a next one with q = 0) must not become nan
        grown_R = (scales[-1] + log_ratio_R).clamp(max=0.0)
        scales.append(grown_R.where(scales[-1] > NEVER, NEVER))
    return torch.stack(scales, dim=1)


def block_log_thresholds(drafts_RK: Tensor, log_p_RTV: Tensor, log_q_RKV: Tensor) -> Tensor:
    """fp32 [R, K]: log h_i for i = 1 .. K; -inf behind the n drafts that a row has.

    S_i = sum over x of max(P_i p_{i+1}(x) - q_{i+1}(x), 0); h_i = S_i / (S_i + 1 - P_i), 1 if that is 0 / 0; h_n = P_n.
    """
    log_scales_RT = block_log_scales(drafts_RK, log_p_RTV, log_q_RKV)
    present_R = _leading(drafts_RK >= 0)
    thresholds = []
    for place in range(1, drafts_RK.shape[1] + 1):
        log_scale_R = log_scales_RT[:, place]
        log_h_R = log_scale_R
        if place < drafts_RK.shape[1]:
            log_excess_RV = _log_excess(log_scale_R.unsqueeze(1) + log_p_RTV[:, place], log_q_RKV[:, place])
            inner_R = _log_share(_log_sum(log_excess_RV), _log_complement(log_scale_R))
            log_h_R = log_scale_R.where(present_R == place, inner_R)
        thresholds.append(log_h_R.where(present_R >= place, NEVER))
    return torch.stack(thresholds, dim=1) if thresholds else log_p_RTV.new_empty(drafts_RK.shape)


def residual(
    drafts_RK: Tensor, log_p_RTV: Tensor, log_q_RKV: Tensor, accepted_R: Tensor, *, log_scales_RT: Tensor
) -> Tensor:
    """fp32 log weights [R, V] of the token behind the accepted drafts: max(P p - q, 0), or p where every draft stood.

    ``log_scales_RT`` are the log P: ``block_log_scales`` under the block rule, zeros under the standard one.

    Where nothing is left, p = q but for rounding (P p <= q for every token and both sum to 1), so that the rejection itself was
    an event of a rounding error's probability. Then p is drawn from: the law moves by no more than that, and no token of p = 0
    can come.
    """
    rows_R = torch.arange(drafts_RK.shape[0], device=drafts_RK.device)
    log_p_RV = log_p_RTV[rows_R, accepted_R]
    rejected_R1 = (accepted_R < _leading(drafts_RK >= 0)).unsqueeze(1)
    if drafts_RK.shape[1] == 0:
        return log_p_RV
    log_q_RV = log_q_RKV[rows_R, accepted_R.clamp(max=drafts_RK.shape[1] - 1)]
    log_scale_R1 = log_scales_RT.gather(1, accepted_R.unsqueeze(1))
    log_left_RV = _log_excess(log_scale_R1 + log_p_RV, log_q_RV)
    any_left_R1 = (log_left_RV > NEVER).any(dim=1, keepdim=True)
    return log_left_RV.where(rejected_R1 & any_left_R1, log_p_RV)


# ---- requests to tensors and back -----------------------------------------------------------------------------------------

Block = tuple[Tensor, Drafted]  # a request's target logits [its rows, V], and the request


def _is_drawn(request: Drafted) -> bool:
    return (
        request.draft_logits_KV is not None
        and len(request.drafts) > 0
        and request.rows[0].params.temperature > 0
    )


def _by_equality(blocks: Sequence[Block]) -> list[Verified]:
    if not blocks:
        return []
    tokens = iter(
        sample(torch.cat([logits for logits, _ in blocks]), [row for _, r in blocks for row in r.rows])
    )
    requests = [request for _, request in blocks]
    drafts_RK = _padded_drafts(requests, device=blocks[0][0].device)
    targets = [[next(tokens) for _ in request.rows] for request in requests]
    targets_RT = _padded(targets, width=drafts_RK.shape[1] + 1, device=drafts_RK.device)
    accepted = accept_points(drafts_RK, targets_RT).tolist()
    return [
        _verdict(request, a, token=of_row[a])
        for request, a, of_row in zip(requests, accepted, targets, strict=True)
    ]


def _by_lot(blocks: Sequence[Block], rates: Sequence[float]) -> list[Verified]:
    if not blocks:
        return []
    requests = [request for _, request in blocks]
    drafts_RK = _padded_drafts(requests, device=blocks[0][0].device)
    assert drafts_RK.shape[1] <= len(rates)
    seeds_R, positions_R = _keys(requests, device=drafts_RK.device)
    uniforms_RK = acceptance_uniforms(seeds_R, positions_R - 1, count=drafts_RK.shape[1])
    accepted = accept_synthetic(drafts_RK, rates, uniforms_RK).tolist()
    ending_RV = torch.stack([logits[a] for (logits, _), a in zip(blocks, accepted, strict=True)])
    tokens = sample(ending_RV, [request.rows[a] for request, a in zip(requests, accepted, strict=True)])
    return [
        _verdict(request, a, token=token)
        for request, a, token in zip(requests, accepted, tokens, strict=True)
    ]


def _by_ratio(blocks: Sequence[Block], rule: RejectionSampleMethod) -> list[Verified]:
    requests = [request for _, request in blocks]
    vocabulary, device = blocks[0][0].shape[1], blocks[0][0].device
    drafts_RK = _padded_drafts(requests, device=device)
    width = drafts_RK.shape[1]
    log_p_RTV = torch.full((len(blocks), width + 1, vocabulary), NEVER, device=device)
    log_q_RKV = torch.full((len(blocks), width, vocabulary), NEVER, device=device)
    for index, (logits_TV, request) in enumerate(blocks):
        log_p_RTV[index, : len(request.rows)] = log_probabilities(logits_TV, request.rows)
        count, draft_logits_KV = len(request.drafts), request.draft_logits_KV
        assert draft_logits_KV is not None and NO_DRAFT not in request.drafts
        temperatures_K = draft_logits_KV.new_full(
            (count,), request.rows[0].params.temperature, dtype=torch.float64
        )
        log_q_RKV[index, :count] = draft_log_probabilities(draft_logits_KV[:count], temperatures_K)
    seeds_R, positions_R = _keys(requests, device=drafts_RK.device)
    uniforms_RK = acceptance_uniforms(seeds_R, positions_R - 1, count=drafts_RK.shape[1])
    if rule is RejectionSampleMethod.BLOCK:
        log_scales_RT = block_log_scales(drafts_RK, log_p_RTV, log_q_RKV)
        accepted_R = accept_block(drafts_RK, log_p_RTV, log_q_RKV, uniforms_RK)
    else:
        log_scales_RT = torch.zeros_like(log_p_RTV[:, :, 0])
        accepted_R = accept_standard(drafts_RK, log_p_RTV, log_q_RKV, uniforms_RK)
    log_left_RV = residual(drafts_RK, log_p_RTV, log_q_RKV, accepted_R, log_scales_RT=log_scales_RT)
    tokens = draw(log_left_RV, gumbel(seeds_R, positions_R + accepted_R, count=vocabulary)).tolist()
    return [
        _verdict(request, a, token=token)
        for request, a, token in zip(requests, accepted_R.tolist(), tokens, strict=True)
    ]


def _verdict(request: Drafted, accepted: int, *, token: int) -> Verified:
    return Verified(tokens=(*request.drafts[:accepted], token), accepted=accepted)


def _keys(requests: Sequence[Drafted], *, device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [R]: seeds, and the output positions of the tokens that the first rows give."""
    seeds = [request.rows[0].seed for request in requests]
    positions = [request.rows[0].position for request in requests]
    return torch.tensor(seeds, device=device), torch.tensor(positions, device=device)


def _padded_drafts(requests: Sequence[Drafted], *, device: torch.device) -> Tensor:
    width = max(len(request.drafts) for request in requests)
    return _padded([request.drafts for request in requests], width=width, device=device)


def _padded(values: Sequence[Sequence[int]], *, width: int, device: torch.device) -> Tensor:
    rows = [[*row, *[NO_DRAFT] * (width - len(row))] for row in values]
    return torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(values), width)


def _chunks(
    chosen: Sequence[int], requests: Sequence[Drafted], *, vocabulary: int
) -> Iterator[Sequence[int]]:
    """``chosen`` in runs whose target rows, padded, take at most ``CHUNK_BYTES``; requests do not depend on one another."""
    if not chosen:
        return
    rows = max(len(requests[index].rows) for index in chosen)
    size = max(1, CHUNK_BYTES // (4 * rows * vocabulary))
    for start in range(0, len(chosen), size):
        yield chosen[start : start + size]


# ---- logarithms -----------------------------------------------------------------------------------------------------------


def _leading(stands_RK: Tensor) -> Tensor:
    return stands_RK.long().cumprod(dim=1).sum(dim=1)


def _log_ratio(drafts_RK: Tensor, log_p_RTV: Tensor, log_q_RKV: Tensor) -> Tensor:
    """log p(d) - log q(d), [R, K]: -inf where p is 0 (whatever q is) or the draft absent, +inf where only q is."""
    ids_RK1 = drafts_RK.clamp(min=0).unsqueeze(2)
    log_p_RK = log_p_RTV[:, :-1].gather(2, ids_RK1).squeeze(2)
    log_q_RK = log_q_RKV.gather(2, ids_RK1).squeeze(2)
    return (log_p_RK - log_q_RK).where((log_p_RK > NEVER) & (drafts_RK >= 0), NEVER)


def _log_excess(log_a: Tensor, log_b: Tensor) -> Tensor:
    """log max(a - b, 0) = log a + log(1 - exp(log b - log a)), exact where a and b nearly agree; -inf where a <= b."""
    more = log_a > log_b  # never where a is 0
    return (log_a + _log_complement((log_b - log_a).where(more, NEVER))).where(more, NEVER)


def _log_complement(log_a: Tensor) -> Tensor:
    """log(1 - a) for a in [0, 1]."""
    return (-torch.expm1(log_a)).log()


def _log_sum(log_RV: Tensor) -> Tensor:
    """fp32 [R]. In fp64, rounded once: a row does not depend on how a device splits the sum."""
    return torch.logsumexp(log_RV.double(), dim=1).float()


def _log_share(log_a: Tensor, log_b: Tensor) -> Tensor:
    """log(a / (a + b)), 0 if both are 0."""
    return (log_a - torch.logaddexp(log_a, log_b)).where((log_a > NEVER) | (log_b > NEVER), 0.0)
