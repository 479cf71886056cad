"""Cuts by sorting whole rows, in torch, without a look at any value from the host: may be captured. Slow for long rows."""

import torch
from torch import Tensor

from flashstep.kernels.sampling import EVERYTHING, order

ROWS_TOGETHER = 48  # what fp64 copies of a chunk take stays below 1 GB at the released vocabulary


def least_kept(
    logits_TV: Tensor, *, temperature_T: Tensor, top_k_T: Tensor, top_p_T: Tensor, min_p_T: Tensor
) -> Tensor:
    """See ``Sampling.least_kept``."""
    columns = (logits_TV, temperature_T, top_k_T, top_p_T, min_p_T)
    return torch.cat(
        [_least(*chunk) for chunk in zip(*(c.split(ROWS_TOGETHER) for c in columns), strict=True)]
    )


def _least(
    logits_TV: Tensor, temperature_T: Tensor, top_k_T: Tensor, top_p_T: Tensor, min_p_T: Tensor
) -> Tensor:
    vocabulary = logits_TV.shape[1]
    keys_TV = order(logits_TV).sort(dim=1, descending=True).values
    warm_T = temperature_T > 0
    ordered_TV = _logits(keys_TV).double()
    scaled_TV = (ordered_TV - ordered_TV[:, :1]) / temperature_T.where(warm_T, 1.0).unsqueeze(1)
    places_V = torch.arange(vocabulary, device=logits_TV.device)
    limit_T = torch.where(top_k_T > 0, top_k_T, vocabulary)
    live_TV = (scaled_TV >= torch.log(min_p_T).unsqueeze(1)) & (places_V < limit_T.unsqueeze(1))
    mass_TV = torch.softmax(scaled_TV.masked_fill(~live_TV, -torch.inf), dim=1)
    before_TV = mass_TV.cumsum(dim=1) - mass_TV
    top_p_T1 = top_p_T.unsqueeze(1)
    kept_T = (live_TV & ((before_TV < top_p_T1) | (top_p_T1 >= 1) | (places_V == 0))).sum(dim=1)
    # a row that pads a step may be NaN, of which nothing is kept
    least_T = keys_TV.gather(1, (kept_T - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    cuts_T = ((top_k_T > 0) | (top_p_T < 1) | (min_p_T > 0)) & warm_T
    return torch.where(cuts_T, least_T, EVERYTHING)


def _logits(keys_TV: Tensor) -> Tensor:
    """fp32: what ``order`` made the keys of."""
    ordered = (keys_TV + (2**32 - 1)) >> 32
    return (ordered ^ (ordered >> 31 & 0x7FFFFFFF)).int().view(torch.float32)
