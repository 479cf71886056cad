"""Sampling in plain torch, fp64. Noise is only drawn for rows that use it."""

from typing import Any

import torch
from torch import Tensor

from flashstep.kernels.sampling import EVERYTHING, order
from flashstep.kernels.sampling.philox import gumbel

NEVER = -torch.inf


def sample(
    logits_TV: Tensor,
    *,
    temperature_T: Tensor,
    seed_T: Tensor,
    position_T: Tensor,
    least_T: Tensor | None = None,
) -> Tensor:
    """See ``Sampling.sample``."""
    tokens_T = logits_TV.argmax(dim=1)
    warm = (temperature_T > 0).nonzero().squeeze(1)
    if warm.numel():
        scaled_RV = _scaled(logits_TV[warm], temperature_T[warm])
        if least_T is not None:
            scaled_RV = scaled_RV.masked_fill(order(logits_TV[warm]) < least_T[warm].unsqueeze(1), NEVER)
        noise_RV = gumbel(seed_T[warm], position_T[warm], count=logits_TV.shape[1])
        tokens_T[warm] = (scaled_RV + noise_RV).argmax(dim=1)
    return tokens_T


def least_kept(
    logits_TV: Tensor, *, temperature_T: Tensor, top_k_T: Tensor, top_p_T: Tensor, min_p_T: Tensor
) -> Tensor:
    """See ``Sampling.least_kept``."""
    least_T = torch.full_like(top_k_T, EVERYTHING)
    cuts_T = ((top_k_T > 0) | (top_p_T < 1) | (min_p_T > 0)) & (temperature_T > 0)
    for row in cuts_T.nonzero().squeeze(1).tolist():
        least_T[row] = _least_of_row(
            logits_TV[row],
            temperature=temperature_T[row],
            top_k=int(top_k_T[row]),
            top_p=float(top_p_T[row]),
            min_p=min_p_T[row],
        )
    return least_T


def chain(logits_RKV: Tensor, *, anchor_R: Tensor, embedding_VM: Tensor, weight: Any, places: int) -> Tensor:
    """See ``Sampling.chain``."""
    tokens, weight_VM = [anchor_R], weight.double()
    for place in range(places):
        bias_RV = (embedding_VM[tokens[-1]].double() @ weight_VM.T).float()
        tokens.append((logits_RKV[:, place] + bias_RV).argmax(dim=1))
    return torch.stack(tokens[1:], dim=1)


def _least_of_row(
    logits_V: Tensor, *, temperature: Tensor, top_k: int, top_p: float, min_p: Tensor
) -> Tensor:
    keys_V, ids_V = order(logits_V.unsqueeze(0))[0].sort(descending=True)
    ordered_V = _scaled(logits_V.unsqueeze(0), temperature.reshape(1))[0, ids_V]
    kept = int((ordered_V >= torch.log(min_p)).sum())  # the largest is at 0; log(0) cuts nothing
    if top_k > 0:
        kept = min(kept, top_k)
    if top_p < 1:
        mass = torch.softmax(ordered_V[:kept], dim=0)
        before = mass.cumsum(dim=0) - mass  # of the tokens that stand before this one
        kept = max(int((before < top_p).sum()), 1)
    return keys_V[kept - 1]


def _scaled(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    """fp64 logits over temperature, less the largest."""
    wide_RV = logits_RV.double()
    largest_R1 = wide_RV.amax(dim=1, keepdim=True)
    largest_R1 = largest_R1.where(largest_R1 > NEVER, 0.0)
    return (wide_RV - largest_R1) / temperature_R.unsqueeze(1)
