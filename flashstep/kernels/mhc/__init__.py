"""Single-pass manifold hyper-connections (spec/model.md 2): what stands between two sublayers.

Owns the signatures. A site's coefficients [T, M] are pre, post and comb side by side: ``post`` and ``comb`` write its sublayer's
output, ``pre`` reads the streams for the NEXT site; comb[i, j] carries INPUT stream i to OUTPUT stream j. Entering a sublayer is
coefficients, collapse, RMS norm and the quantiser of its FP8 linears. Suffixes: T rows, S streams, D width, M = 2S + S*S
coefficients, R chosen rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashstep.kernels.registry import Cost, Family, Implementation

OPS = ("prepare_site", "enter", "boundary", "write", "leave")
ONE_LAUNCH = ("prepare_site", "enter", "boundary", "leave")


class Hidden(NamedTuple):
    """What a sublayer reads: bf16 [T, D], and the same as ``gemm.quantise_input`` gives it."""

    plain_TD: Tensor
    quantised: Any

    def keep(self, rows: Tensor) -> "Hidden":
        """Both for ``rows`` (int64) only."""
        return Hidden(self.plain_TD[rows], self.quantised[rows])


class Entered(NamedTuple):
    """A sublayer's beginning: its site's coefficients fp32 [T, M], what it reads, and the streams' mean bf16 [T, D] if asked."""

    coefficients_TM: Tensor
    hidden: Hidden
    mean_TD: Tensor | None


class Mhc(Family):
    """Public mHC ops. Streams may lie with any strides but the last; coefficients with any row stride."""

    TABLE = (
        *(
            Implementation(
                op=f"mhc.{op}", module="flashstep.kernels.mhc.cuda", needs=frozenset({"sm90", "nvcc"})
            )
            for op in ONE_LAUNCH
        ),
        *(
            Implementation(op=f"mhc.{op}", module="flashstep.kernels.mhc.triton", needs=frozenset({"sm90"}))
            for op in OPS
        ),
        *(Implementation(op=f"mhc.{op}", module="flashstep.kernels.mhc.reference") for op in OPS),
    )

    def prepare_site(
        self,
        fn: Tensor,
        *,
        base_M: Tensor,
        scale_3: Tensor,
        norm_D: Tensor,
        iterations: int,
        eps: float,
        norm_eps: float,
    ) -> Any:
        """fp32 projection [M, S * D] (stream-major columns), base and scales of a site, and its norm's weight: made ready.

        ``iterations`` and ``eps`` are Sinkhorn's, ``norm_eps`` is of both statistics. Its ``double()`` is what the reference
        would have made, so that the switch can force one op alone.
        """
        outputs = fn.shape[0]
        assert fn.dtype is torch.float32 and fn.shape[1] % norm_D.shape[0] == 0
        streams = fn.shape[1] // norm_D.shape[0]
        assert outputs == 2 * streams + streams * streams
        assert base_M.dtype is torch.float32 and base_M.shape == (outputs,) and scale_3.shape == (3,)
        assert norm_D.dtype is torch.bfloat16
        return self._loaded["prepare_site"](
            fn,
            base_M=base_M,
            scale_3=scale_3,
            norm_D=norm_D,
            iterations=iterations,
            eps=eps,
            norm_eps=norm_eps,
        )

    def enter(self, x_TSD: Tensor, pre_TS: Tensor, site: Any, *, mean: bool = False) -> Entered:
        """bf16 streams and the previous site's ``pre`` (fp32 [T, S]) -> what the sublayer of ``site`` begins with.

        One RMS statistic over all S * D for the coefficients, one over D for the norm.
        """
        assert x_TSD.dtype is torch.bfloat16 and pre_TS.dtype is torch.float32
        assert pre_TS.shape == x_TSD.shape[:2]
        return self._loaded["enter"](x_TSD, pre_TS, site, mean=mean)

    def boundary(
        self, y_TD: Tensor, x_TSD: Tensor, coefficients_TM: Tensor, site: Any, *, mean: bool = False
    ) -> tuple[Tensor, Entered]:
        """``write`` by one site's coefficients, then ``enter`` of the next ``site`` with their ``pre``.

        -> the streams [T, S, D], and what the next sublayer begins with.
        """
        _check_written(y_TD, x_TSD, coefficients_TM)
        return self._loaded["boundary"](y_TD, x_TSD, coefficients_TM, site, mean=mean)

    def write(self, y_TD: Tensor, x_TSD: Tensor, coefficients_TM: Tensor) -> Tensor:
        """bf16 sublayer output and streams -> bf16 [T, S, D]: b(post_j y + sum_i comb[i, j] x_i)."""
        _check_written(y_TD, x_TSD, coefficients_TM)
        return self._loaded["write"](y_TD, x_TSD, coefficients_TM)

    def leave(
        self,
        y_TD: Tensor,
        x_TSD: Tensor,
        coefficients_TM: Tensor,
        norm_D: Tensor,
        *,
        norm_eps: float,
        rows_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Behind the last site: ``write``, and the collapse of that by ``pre``, of ``rows_R`` (int64) or of all rows.

        -> the collapse and its RMS norm, both bf16 [R, D].
        """
        _check_written(y_TD, x_TSD, coefficients_TM)
        assert norm_D.dtype is torch.bfloat16 and (rows_R is None or rows_R.dtype is torch.int64)
        return self._loaded["leave"](y_TD, x_TSD, coefficients_TM, norm_D, norm_eps=norm_eps, rows_R=rows_R)


def _check_written(y_TD: Tensor, x_TSD: Tensor, coefficients_TM: Tensor) -> None:
    rows, streams, width = x_TSD.shape
    assert x_TSD.dtype is torch.bfloat16 and y_TD.dtype is torch.bfloat16 and y_TD.shape == (rows, width)
    assert coefficients_TM.dtype is torch.float32
    assert coefficients_TM.shape == (rows, 2 * streams + streams * streams)


def enter_cost(*, rows: int, streams: int, width: int) -> Cost:
    """All streams in, the fp32 projection once, the plain and the quantised row out (bf16)."""
    outputs, flat = 2 * streams + streams * streams, streams * width
    return Cost(
        bytes=2 * rows * (flat + 2 * width) + 4 * outputs * (flat + rows),
        flops=2 * rows * (flat * (outputs + 2) + 8 * width),
    )


def boundary_cost(*, rows: int, streams: int, width: int) -> Cost:
    """``enter`` and, before it, the sublayer's output in and the streams out; they are read once for both."""
    entered = enter_cost(rows=rows, streams=streams, width=width)
    coefficients = 4 * rows * (2 * streams + streams * streams)
    return Cost(
        bytes=entered.bytes + 2 * rows * width * (streams + 1) + coefficients,
        flops=entered.flops + 2 * rows * width * streams * (streams + 1),
    )


def write_cost(*, rows: int, streams: int, width: int) -> Cost:
    """All streams in and out, one sublayer row in."""
    return Cost(
        bytes=2 * rows * width * (2 * streams + 1) + 4 * rows * streams * (streams + 1),
        flops=2 * rows * width * streams * (streams + 1),
    )


def leave_cost(*, rows: int, streams: int, width: int) -> Cost:
    """Of ``rows`` chosen rows: all streams and the sublayer's output in, two rows out."""
    return Cost(
        bytes=2 * rows * width * (streams + 3) + 4 * rows * streams * (streams + 2),
        flops=2 * rows * width * (streams * (streams + 2) + 4),
    )
