"""The sampler: raw logits and each row's parameters -> one token a row.

Owns the order of processors, which is vLLM's: grammar, bad words, min_tokens, logit bias, penalties; then for temperature 0 the
largest, else temperature, min-p, top-k, top-p and Gumbel-max. Noise is keyed by (seed, output position), everything is worked out
row by row in fp64, so a row's token is the same whatever stands beside it. Suffixes: R rows, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.kernels.sampling.philox import gumbel
from flashstep.request import SamplingParams

NEVER = -torch.inf
CHUNK_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """What one row's choice depends on besides its logits. ``position`` counts outputs from 0.

    ``allowed_V`` bool [V] is what a grammar lets through, on the logits' device; None: everything.
    """

    params: SamplingParams
    seed: int
    position: int
    prompt: Sequence[int]
    output: Sequence[int]  # the tokens before ``position``
    eos_token_ids: tuple[int, ...]
    allowed_V: Tensor | None = None


def sample(logits_RV: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """fp32 logits [R, V] (not changed) -> R token ids. Works on ``CHUNK_BYTES`` of fp64 logits at a time."""
    assert logits_RV.shape[0] == len(rows)
    size = max(CHUNK_BYTES // (8 * logits_RV.shape[1]), 1)
    return [
        token
        for start in range(0, len(rows), size)
        for token in _sample(logits_RV[start : start + size], rows[start : start + size])
    ]


def _sample(logits_RV: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    adjusted_RV = logits_RV.double()  # a copy: fp32 came in
    for index, row in enumerate(rows):
        adjust_(adjusted_RV[index], row)
    tokens_R = adjusted_RV.argmax(dim=1)  # the first of equal ones
    random = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if random:
        chosen = torch.tensor(random, device=logits_RV.device)
        tokens_R[chosen] = _draw(adjusted_RV[chosen], [rows[index] for index in random])
    return tokens_R.tolist()


def adjust_(logits_V: Tensor, row: SampleRow) -> None:
    """Apply in place, to one fp64 row, the processors that may change which token is the largest.

    Where bad words and min_tokens would ban all that a grammar allows, the grammar wins: the answer must keep its form.
    """
    params = row.params
    if row.allowed_V is not None:
        logits_V.masked_fill_(~row.allowed_V, NEVER)
    banned = [word[-1] for word in params.bad_words if _would_complete(word, row.output)]
    if len(row.output) < params.min_tokens:
        banned += [*row.eos_token_ids, *params.stop_token_ids]
    if banned and not _nothing_left(row.allowed_V, banned):
        logits_V[banned] = NEVER
    if params.logit_bias:
        logits_V[list(params.logit_bias)] += logits_V.new_tensor(list(params.logit_bias.values()))
    if params.repetition_penalty != 1:
        seen = torch.tensor([*row.prompt, *row.output], dtype=torch.int64, device=logits_V.device).unique()
        values = logits_V[seen]
        penalty = params.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (params.frequency_penalty or params.presence_penalty) and row.output:
        used, counts = torch.tensor(row.output, dtype=torch.int64, device=logits_V.device).unique(
            return_counts=True
        )
        logits_V[used] -= params.frequency_penalty * counts + params.presence_penalty


def probabilities(adjusted_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """fp64 adjusted logits [R, V] -> fp64 [R, V], the distribution that a token is drawn from at temperatures above 0."""
    return torch.softmax(_truncated(adjusted_RV, params), dim=1)


def log_probabilities(logits_RV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """fp32 logits [R, V] of rows at temperatures above 0 -> fp32 [R, V]: the log of the distribution that ``sample`` draws from.

    Worked out in fp64 and rounded once; -inf where a token cannot come, in the whole row if none can.
    """
    if not rows:
        return logits_RV.float()
    adjusted_RV = logits_RV.double()  # a copy: fp32 came in
    for index, row in enumerate(rows):
        adjust_(adjusted_RV[index], row)
    truncated_RV = _truncated(adjusted_RV, [row.params for row in rows])
    possible_R1 = (truncated_RV > NEVER).any(dim=1, keepdim=True)
    return torch.log_softmax(truncated_RV, dim=1).where(possible_R1, NEVER).float()


def _nothing_left(allowed_V: Tensor | None, banned: Sequence[int]) -> bool:
    if allowed_V is None:
        return False
    left_V = allowed_V.clone()
    left_V[banned] = False
    return not bool(left_V.any())


def _would_complete(word: Sequence[int], output: Sequence[int]) -> bool:
    before = tuple(word[:-1])
    return not before or tuple(output[-len(before) :]) == before


def _draw(adjusted_RV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    device = adjusted_RV.device
    seeds_R = torch.tensor([row.seed for row in rows], dtype=torch.int64, device=device)
    positions_R = torch.tensor([row.position for row in rows], dtype=torch.int64, device=device)
    noise_RV = gumbel(seeds_R, positions_R, count=adjusted_RV.shape[1])
    return (_truncated(adjusted_RV, [row.params for row in rows]) + noise_RV).argmax(dim=1)


def _truncated(adjusted_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits over temperature, less the largest, with -inf where min-p, top-k or top-p cut."""
    scaled_RV = _scaled(adjusted_RV, params)
    column = _column(params, device=adjusted_RV.device)
    min_p = column(lambda p: p.min_p)
    if bool((min_p > 0).any()):
        scaled_RV = scaled_RV.masked_fill(
            scaled_RV < torch.log(min_p), NEVER
        )  # the largest is at 0; log(0) cuts nothing
    cut = [index for index, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if cut:
        chosen = torch.tensor(cut, device=adjusted_RV.device)
        scaled_RV[chosen] = _cut_tail(scaled_RV[chosen], [params[index] for index in cut])
    return scaled_RV


def _scaled(adjusted_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    largest_R1 = adjusted_RV.amax(dim=1, keepdim=True)
    largest_R1 = largest_R1.where(largest_R1 > NEVER, 0.0)  # every token banned: nothing to subtract
    return (adjusted_RV - largest_R1) / _column(params, device=adjusted_RV.device)(lambda p: p.temperature)


def _cut_tail(scaled_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Keep the ``top_k`` largest, then of those the fewest whose probabilities reach ``top_p``; lower ids win ties."""
    vocabulary = scaled_RV.shape[1]
    column = _column(params, device=scaled_RV.device)
    ordered_RV, ids_RV = scaled_RV.sort(dim=1, descending=True, stable=True)
    places_V = torch.arange(vocabulary, device=scaled_RV.device)
    ordered_RV = ordered_RV.masked_fill(
        places_V >= column(lambda p: p.top_k if p.top_k > 0 else vocabulary), NEVER
    )
    mass_RV = torch.softmax(ordered_RV, dim=1)
    before_RV = mass_RV.cumsum(dim=1) - mass_RV  # of the tokens that stand before this one
    top_p = column(lambda p: p.top_p)
    beyond_RV = (before_RV >= top_p) & (top_p < 1) & (places_V > 0)
    return torch.empty_like(scaled_RV).scatter_(1, ids_RV, ordered_RV.masked_fill(beyond_RV, NEVER))


def _column(
    params: Sequence[SamplingParams], *, device: torch.device
) -> Callable[[Callable[[SamplingParams], float]], Tensor]:
    """A function that gives one parameter of all rows as fp64 [R, 1]."""
    return lambda get: torch.tensor([get(p) for p in params], dtype=torch.float64, device=device).unsqueeze(1)
