"""The sampler of one row, written as the definition reads: what ``sampler.sample`` must equal, and what tests compare it with."""

import math

import torch
from torch import Tensor

from flashstep.kernels.sampling.philox import gumbel
from flashstep.sampling.sampler import NEVER, SampleRow, adjust_


def sample_plain(logits_V: Tensor, row: SampleRow) -> int:
    """fp32 logits [V] -> the token of ``row``."""
    adjusted_V = logits_V.double()
    adjust_(adjusted_V, row)
    adjusted = adjusted_V.tolist()
    if row.params.temperature == 0:
        return adjusted.index(max(adjusted))
    allowed = kept_tokens(adjusted, row)
    noise = gumbel(torch.tensor([row.seed]), torch.tensor([row.position]), count=len(adjusted))[0].tolist()
    largest = max(adjusted)
    return max(allowed, key=lambda token: (adjusted[token] - largest) / row.params.temperature + noise[token])


def kept_tokens(adjusted: list[float], row: SampleRow) -> list[int]:
    """The tokens that min-p, top-k and top-p leave, most probable first; lower ids win ties."""
    params = row.params
    largest = max(adjusted)
    weights = {t: math.exp((x - largest) / params.temperature) for t, x in enumerate(adjusted) if x > NEVER}
    tokens = sorted((t for t, w in weights.items() if w >= params.min_p), key=lambda t: (-weights[t], t))
    if params.top_k > 0:
        tokens = tokens[: params.top_k]
    total = sum(weights[t] for t in tokens)
    kept, mass = [], 0.0
    for token in tokens:
        if params.top_p < 1 and mass >= params.top_p * total and kept:
            break
        kept.append(token)
        mass += weights[token]
    return kept
