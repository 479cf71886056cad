"""mHC in plain torch: float64 inside; coefficients are rounded to fp32 at the end, streams and norms to bf16.

What meets here of other families (RMS norm, quantiser of FP8 linears) is the same arithmetic as theirs; tests hold it to theirs.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashstep.kernels.mhc import Entered, Hidden
from flashstep.quant import mxfp8


class PreparedSite(NamedTuple):
    """float64 projection [S * D, M], already times the scale of its output (exact: both were fp32), and base [M].

    ``row`` and ``column`` [S * S, S * S] add what stands in one row (column) of a flat S x S matrix, to each of its places.
    """

    projection: Tensor
    base: Tensor
    row: Tensor
    column: Tensor
    norm_D: Tensor
    iterations: int
    eps: float
    norm_eps: float

    def double(self) -> "PreparedSite":
        return self


def prepare_site(
    fn: Tensor,
    *,
    base_M: Tensor,
    scale_3: Tensor,
    norm_D: Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> PreparedSite:
    """See ``Mhc.prepare_site``."""
    streams = fn.shape[1] // norm_D.shape[0]
    counts = torch.tensor([streams, streams, streams * streams], device=fn.device)
    scale_M = scale_3.double().repeat_interleave(counts)
    ones = torch.ones(streams, streams, dtype=torch.float64, device=fn.device)
    one = torch.eye(streams, dtype=torch.float64, device=fn.device)
    return PreparedSite(
        projection=(fn.double().T * scale_M).contiguous(),
        base=base_M.double(),
        row=torch.kron(one, ones),
        column=torch.kron(ones, one),
        norm_D=norm_D,
        iterations=iterations,
        eps=eps,
        norm_eps=norm_eps,
    )


def enter(x_TSD: Tensor, pre_TS: Tensor, site: Any, *, mean: bool) -> Entered:
    """See ``Mhc.enter``."""
    plain_TD = rms(collapse(x_TSD, pre_TS), site.norm_D, eps=site.norm_eps)
    shares_TS = torch.full_like(pre_TS, 1 / pre_TS.shape[1])
    return Entered(
        coefficients_TM=coefficients(x_TSD, site),
        hidden=Hidden(plain_TD, mxfp8.quantise_dequantise(plain_TD, dtype=torch.float64)),
        mean_TD=collapse(x_TSD, shares_TS) if mean else None,
    )


def boundary(
    y_TD: Tensor, x_TSD: Tensor, coefficients_TM: Tensor, site: Any, *, mean: bool
) -> tuple[Tensor, Entered]:
    """See ``Mhc.boundary``."""
    x_TSD = write(y_TD, x_TSD, coefficients_TM)
    return x_TSD, enter(x_TSD, coefficients_TM[:, : x_TSD.shape[1]], site, mean=mean)


def write(y_TD: Tensor, x_TSD: Tensor, coefficients_TM: Tensor) -> Tensor:
    """See ``Mhc.write``: output stream j sums over input streams i of comb[i, j]."""
    streams = x_TSD.shape[1]
    sources = torch.cat((y_TD.unsqueeze(1), x_TSD), dim=1).double()
    shares = coefficients_TM[:, streams:].unflatten(1, (1 + streams, streams)).double()  # post, then comb
    return torch.bmm(shares.transpose(1, 2), sources).bfloat16()


def leave(
    y_TD: Tensor,
    x_TSD: Tensor,
    coefficients_TM: Tensor,
    norm_D: Tensor,
    *,
    norm_eps: float,
    rows_R: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See ``Mhc.leave``."""
    if rows_R is not None:
        y_TD, x_TSD, coefficients_TM = y_TD[rows_R], x_TSD[rows_R], coefficients_TM[rows_R]
    hidden_RD = collapse(write(y_TD, x_TSD, coefficients_TM), coefficients_TM[:, : x_TSD.shape[1]])
    return hidden_RD, rms(hidden_RD, norm_D, eps=norm_eps)


def coefficients(x_TSD: Tensor, site: Any) -> Tensor:
    """fp32 [T, M] of bf16 streams: project first, then multiply by ONE statistic over all streams."""
    site = site.double()
    streams = x_TSD.shape[1]
    z = x_TSD.flatten(1).double()
    statistic = torch.rsqrt(z.square().mean(-1, keepdim=True) + site.norm_eps)
    g = torch.addcmul(site.base, z @ site.projection, statistic)
    pre, post = torch.sigmoid(g[:, : 2 * streams]).chunk(2, dim=1)
    comb = sinkhorn(g[:, 2 * streams :].unflatten(1, (streams, streams)), site)
    return torch.cat((pre + site.eps, 2 * post, comb.flatten(1)), dim=1).float()


def sinkhorn(logits_TSS: Tensor, site: PreparedSite) -> Tensor:
    """Rows are input streams. Softmax stands for the first row normalisation; the last operation is a column one.

    The matrices are flat, rows of the batch innermost: a product with zeros and ones gives every place its sum, plus eps.
    """
    comb_MT = (torch.softmax(logits_TSS, dim=-1) + site.eps).flatten(1).T.contiguous()
    floor = comb_MT.new_full((1, 1), site.eps)
    comb_MT.div_(torch.addmm(floor, site.column, comb_MT))
    for _ in range(site.iterations - 1):
        comb_MT.div_(torch.addmm(floor, site.row, comb_MT))
        comb_MT.div_(torch.addmm(floor, site.column, comb_MT))
    return comb_MT.T.unflatten(1, logits_TSS.shape[1:])


def collapse(x_TSD: Tensor, pre_TS: Tensor) -> Tensor:
    """bf16 [T, D]: b(sum_j pre_j x_j)."""
    return torch.bmm(pre_TS.double().unsqueeze(1), x_TSD.double()).squeeze(1).bfloat16()


def rms(x_TD: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """As ``rms`` of the reference of ``norm_rope``."""
    x = x_TD.double()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * weight_D.double()).bfloat16()
