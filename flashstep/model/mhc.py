"""One mHC site: coefficients from the streams, collapse before a sublayer, write after it (spec/model.md 2).

``pre`` of a site reads for the NEXT site; who passes it on is ``transformer.Block``'s affair.
"""

from typing import NamedTuple

from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.kernels import Ops
from flashstep.model.parameters import Parameters


class Coefficients(NamedTuple):
    """fp32 coefficients of a site for T rows and S streams; comb[i, j] carries input stream i to output stream j."""

    pre_TS: Tensor
    post_TS: Tensor
    comb_TSS: Tensor

    def keep(self, rows: Tensor) -> "Coefficients":
        """The coefficients of ``rows`` only."""
        return Coefficients(self.pre_TS[rows], self.post_TS[rows], self.comb_TSS[rows])


class Site:
    """The hyper-connection of one sublayer (attention or FFN)."""

    def __init__(self, config: ModelConfig, parameters: Parameters, prefix: str, *, ops: Ops) -> None:
        self._mhc = ops.mhc
        self._site = ops.mhc.prepare_site(
            parameters.plain(f"{prefix}_fn"),
            base_M=parameters.plain(f"{prefix}_base"),
            scale_3=parameters.plain(f"{prefix}_scale"),
            streams=config.hc_mult,
        )
        self._iterations = config.hc_sinkhorn_iters
        self._eps = config.hc_eps
        self._norm_eps = config.rms_norm_eps

    def coefficients(self, x_TSD: Tensor) -> Coefficients:
        """bf16 streams before the sublayer (and after Engram) -> this site's coefficients."""
        return Coefficients(
            *self._mhc.coefficients(
                x_TSD, self._site, iterations=self._iterations, eps=self._eps, norm_eps=self._norm_eps
            )
        )

    def collapse(self, x_TSD: Tensor, pre_TS: Tensor) -> Tensor:
        """Streams and the previous site's ``pre`` -> bf16 [T, D]."""
        return self._mhc.collapse(x_TSD, pre_TS)

    def write(self, y_TD: Tensor, x_TSD: Tensor, coefficients: Coefficients) -> Tensor:
        """Sublayer output into the streams it was read from -> bf16 [T, S, D]."""
        return self._mhc.write(y_TD, x_TSD, post_TS=coefficients.post_TS, comb_TSS=coefficients.comb_TSS)
