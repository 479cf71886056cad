"""mHC in plain torch: float64 inside; coefficients are rounded to fp32 at the end, streams to bf16."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class PreparedSite(NamedTuple):
    """float64 projection [S * D, M], already times the scale of its output (exact: both were fp32), and base [M].

    ``row`` and ``column`` [S * S, S * S] add what stands in one row (column) of a flat S x S matrix, to each of its places.
    """

    projection: Tensor
    base: Tensor
    row: Tensor
    column: Tensor

    def double(self) -> "PreparedSite":
        return self


def prepare_site(fn: Tensor, *, base_M: Tensor, scale_3: Tensor, streams: int) -> PreparedSite:
    """See ``Mhc.prepare_site``."""
    counts = torch.tensor([streams, streams, streams * streams], device=fn.device)
    scale_M = scale_3.double().repeat_interleave(counts)
    ones = torch.ones(streams, streams, dtype=torch.float64, device=fn.device)
    one = torch.eye(streams, dtype=torch.float64, device=fn.device)
    return PreparedSite(
        projection=(fn.double().T * scale_M).contiguous(),
        base=base_M.double(),
        row=torch.kron(one, ones),
        column=torch.kron(ones, one),
    )


def coefficients(
    x_TSD: Tensor, site: Any, *, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``Mhc.coefficients``: project first, then multiply by ONE statistic over all streams."""
    site = site.double()
    streams = x_TSD.shape[1]
    z = x_TSD.flatten(1).double()
    statistic = torch.rsqrt(z.square().mean(-1, keepdim=True) + norm_eps)
    g = torch.addcmul(site.base, z @ site.projection, statistic)
    pre, post = torch.sigmoid(g[:, : 2 * streams]).chunk(2, dim=1)
    comb = sinkhorn(
        g[:, 2 * streams :].unflatten(1, (streams, streams)), site, iterations=iterations, eps=eps
    )
    return (pre + eps).float(), (2 * post).float(), comb.float()


def sinkhorn(logits_TSS: Tensor, site: PreparedSite, *, iterations: int, eps: float) -> Tensor:
    """Rows are input streams. Softmax stands for the first row normalisation; the last operation is a column one.

    The matrices are flat, rows of the batch innermost: a product with zeros and ones gives every place its sum, plus eps.
    """
    comb_MT = (torch.softmax(logits_TSS, dim=-1) + eps).flatten(1).T.contiguous()
    floor = comb_MT.new_full((1, 1), eps)
    comb_MT.div_(torch.addmm(floor, site.column, comb_MT))
    for _ in range(iterations - 1):
        comb_MT.div_(torch.addmm(floor, site.row, comb_MT))
        comb_MT.div_(torch.addmm(floor, site.column, comb_MT))
    return comb_MT.T.unflatten(1, logits_TSS.shape[1:])


def collapse(x_TSD: Tensor, pre_TS: Tensor) -> Tensor:
    """See ``Mhc.collapse``."""
    return torch.bmm(pre_TS.double().unsqueeze(1), x_TSD.double()).squeeze(1).bfloat16()


def write(y_TD: Tensor, x_TSD: Tensor, *, post_TS: Tensor, comb_TSS: Tensor) -> Tensor:
    """See ``Mhc.write``: output stream j sums over input streams i of comb[i, j]."""
    sources = torch.cat((y_TD.unsqueeze(1), x_TSD), dim=1).double()
    shares = torch.cat((post_TS.unsqueeze(1), comb_TSS), dim=1).double()
    return torch.bmm(shares.transpose(1, 2), sources).bfloat16()
