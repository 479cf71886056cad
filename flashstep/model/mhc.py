"""The hyper-connections of a model (spec/model.md 2): a site before each sublayer, and the exit behind the last one.

What passes from one site to the next is ``Streams``: a sublayer's output is written by whoever comes next, in one launch with
what that one reads. Suffixes: T rows, S streams, D width, M coefficients, R chosen rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.kernels import Ops
from flashstep.kernels.mhc import Entered
from flashstep.model.parameters import Parameters


class Streams(NamedTuple):
    """Residual streams behind a sublayer: its output bf16 [T, D], the streams bf16 [T, S, D] as it read them, and what writes it.

    ``coefficients_TM``, fp32, are those of the sublayer's site; their ``pre`` reads for the next.
    """

    y_TD: Tensor
    x_TSD: Tensor
    coefficients_TM: Tensor


class Site:
    """The hyper-connection of one sublayer, "attn" or "ffn", of the layer ``prefix``, and the norm behind it."""

    def __init__(
        self, config: ModelConfig, parameters: Parameters, prefix: str, sublayer: str, *, ops: Ops
    ) -> None:
        self._mhc = ops.mhc
        fn = parameters.plain(f"{prefix}.hc_{sublayer}_fn")
        self._first_1S = torch.eye(1, config.hc_mult, device=fn.device)
        self._site = ops.mhc.prepare_site(
            fn,
            base_M=parameters.plain(f"{prefix}.hc_{sublayer}_base"),
            scale_3=parameters.plain(f"{prefix}.hc_{sublayer}_scale"),
            norm_D=parameters.plain(f"{prefix}.{sublayer}_norm.weight"),
            iterations=config.hc_sinkhorn_iters,
            eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
        )

    def begin(self, x_TSD: Tensor, *, mean: bool = False) -> Entered:
        """The first site: the streams are equal copies of the embedding, and it reads one of them."""
        pre_TS = self._first_1S.expand(x_TSD.shape[0], -1)
        return self._mhc.enter(x_TSD, pre_TS, self._site, mean=mean)

    def enter(self, x_TSD: Tensor, coefficients_TM: Tensor, *, mean: bool = False) -> Entered:
        """Streams that were written, by the coefficients of the site before, and have changed since (Engram)."""
        return self._mhc.enter(x_TSD, coefficients_TM[:, : x_TSD.shape[1]], self._site, mean=mean)

    def boundary(self, streams: Streams, *, mean: bool = False) -> tuple[Tensor, Entered]:
        """Write, and enter -> the streams [T, S, D], and what the sublayer begins with."""
        return self._mhc.boundary(*streams, self._site, mean=mean)


class Exit:
    """Behind the last sublayer: the collapsed state, and its norm ``name`` before the head."""

    def __init__(self, config: ModelConfig, parameters: Parameters, name: str, *, ops: Ops) -> None:
        self._mhc = ops.mhc
        self._norm_D = parameters.plain(f"{name}.weight")
        self._eps = config.rms_norm_eps

    def __call__(self, streams: Streams, rows_R: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """-> hidden bf16 [R, D] and the same normed, of ``rows_R`` (int64) or all rows."""
        return self._mhc.leave(*streams, self._norm_D, norm_eps=self._eps, rows_R=rows_R)
