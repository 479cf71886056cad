"""Single-pass manifold hyper-connections (spec/model.md 2).

Owns the signatures. ``pre`` reads the streams for the NEXT site, ``post`` and ``comb`` write this site's output; comb[i, j]
carries INPUT stream i to OUTPUT stream j. Suffixes: T rows, S streams, D width, M = 2S + S*S coefficients.
"""

from typing import Any

import torch
from torch import Tensor

from flashstep.kernels.registry import Cost, Family, Implementation

OPS = ("prepare_site", "coefficients", "collapse", "write")


class Mhc(Family):
    """Public mHC ops."""

    TABLE = (
        *(
            Implementation(op=f"mhc.{op}", module="flashstep.kernels.mhc.triton", needs=frozenset({"sm90"}))
            for op in OPS
        ),
        *(Implementation(op=f"mhc.{op}", module="flashstep.kernels.mhc.reference") for op in OPS),
    )

    def prepare_site(self, fn: Tensor, *, base_M: Tensor, scale_3: Tensor, streams: int) -> Any:
        """fp32 projection [M, S * D] (stream-major columns), base and scales of a site, made ready for ``coefficients``.

        Its ``double()`` is what the reference would have made, so that the switch can force one op alone.
        """
        assert fn.dtype is torch.float32 and fn.ndim == 2 and fn.shape[0] == 2 * streams + streams * streams
        assert base_M.dtype is torch.float32 and scale_3.shape == (3,)
        return self._loaded["prepare_site"](fn, base_M=base_M, scale_3=scale_3, streams=streams)

    def coefficients(
        self,
        x_TSD: Tensor,
        site: Any,
        *,
        iterations: int,
        eps: float,
        norm_eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """bf16 streams -> pre fp32 [T, S], post fp32 [T, S], comb fp32 [T, S, S]; one RMS statistic over all S * D."""
        assert x_TSD.dtype is torch.bfloat16
        return self._loaded["coefficients"](x_TSD, site, iterations=iterations, eps=eps, norm_eps=norm_eps)

    def collapse(self, x_TSD: Tensor, pre_TS: Tensor) -> Tensor:
        """bf16 streams, fp32 [T, S] -> bf16 [T, D]: b(sum_j pre_j x_j)."""
        assert x_TSD.dtype is torch.bfloat16 and pre_TS.dtype is torch.float32
        return self._loaded["collapse"](x_TSD, pre_TS)

    def write(self, y_TD: Tensor, x_TSD: Tensor, *, post_TS: Tensor, comb_TSS: Tensor) -> Tensor:
        """bf16 sublayer output and streams -> bf16 [T, S, D]: b(post_j y + sum_i comb[i, j] x_i)."""
        assert y_TD.dtype is torch.bfloat16 and x_TSD.dtype is torch.bfloat16
        return self._loaded["write"](y_TD, x_TSD, post_TS=post_TS, comb_TSS=comb_TSS)


def coefficients_cost(*, rows: int, streams: int, width: int) -> Cost:
    """bf16 streams once, the fp32 projection once; Sinkhorn is arithmetic on 16 numbers a row."""
    outputs = 2 * streams + streams * streams
    flat = streams * width
    return Cost(bytes=2 * rows * flat + 4 * outputs * (flat + rows), flops=2 * rows * flat * (outputs + 1))


def collapse_cost(*, rows: int, streams: int, width: int) -> Cost:
    """All streams in, one row out."""
    return Cost(bytes=2 * rows * width * (streams + 1) + 4 * rows * streams, flops=2 * rows * streams * width)


def write_cost(*, rows: int, streams: int, width: int) -> Cost:
    """All streams in and out, one sublayer row in."""
    return Cost(
        bytes=2 * rows * width * (2 * streams + 1) + 4 * rows * streams * (streams + 1),
        flops=2 * rows * width * streams * (streams + 1),
    )
