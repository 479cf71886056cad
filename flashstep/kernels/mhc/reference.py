"""mHC in plain torch: float64 inside; coefficients are rounded to fp32 at the end, streams to bf16."""

from typing import Any

import torch
from torch import Tensor


def prepare_projection(fn: Tensor) -> Tensor:
    """See ``Mhc.prepare_projection``: fp32 [M, S * D] -> float64 [S * D, M]."""
    return fn.double().T.contiguous()


def coefficients(
    x_TSD: Tensor,
    projection: Any,
    *,
    base_M: Tensor,
    scale_3: Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``Mhc.coefficients``: project first, then multiply by ONE statistic over all streams."""
    streams = x_TSD.shape[1]
    z = x_TSD.flatten(1).double()
    mixed = (z @ projection) * torch.rsqrt(z.square().mean(-1, keepdim=True) + norm_eps)
    counts = torch.tensor([streams, streams, streams * streams], device=scale_3.device)
    g = base_M.double() + mixed * scale_3.double().repeat_interleave(counts)
    pre = torch.sigmoid(g[:, :streams]) + eps
    post = 2 * torch.sigmoid(g[:, streams : 2 * streams])
    comb = sinkhorn(g[:, 2 * streams :].unflatten(1, (streams, streams)), iterations=iterations, eps=eps)
    return pre.float(), post.float(), comb.float()


def sinkhorn(logits_TSS: Tensor, *, iterations: int, eps: float) -> Tensor:
    """Rows are input streams. Softmax stands for the first row normalisation; the last operation is a column one."""
    comb = torch.softmax(logits_TSS, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def collapse(x_TSD: Tensor, pre_TS: Tensor) -> Tensor:
    """See ``Mhc.collapse``."""
    return (x_TSD.double() * pre_TS.double().unsqueeze(2)).sum(1).bfloat16()


def write(y_TD: Tensor, x_TSD: Tensor, *, post_TS: Tensor, comb_TSS: Tensor) -> Tensor:
    """See ``Mhc.write``: output stream j sums over input streams i of comb[i, j]."""
    carried = comb_TSS.double().transpose(1, 2) @ x_TSD.double()
    return (carried + post_TS.double().unsqueeze(2) * y_TD.double().unsqueeze(1)).bfloat16()
