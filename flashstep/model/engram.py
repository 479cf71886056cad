"""The Engram injection of a layer: look up the n-gram rows, project, add to every stream (spec/model.md 6.4, 6.5).

Takes the hash and the table of ``flashstep.engram``; where the table's bytes live is not known here. The rows are known from the
token ids alone, so a step of many rows fetches them on a CUDA stream of its own while the layers before run.
"""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.engram.hash import EngramHash
from flashstep.engram.table import EngramTable
from flashstep.kernels import Ops
from flashstep.model.linear import Linear8
from flashstep.model.parameters import Parameters

AHEAD_ROWS = (
    512  # a prompt's; a decode step's few rows come soon (H200: 48 in 13 us), and its graph stays one chain
)


class EngramInjection:
    """bf16 streams [T, S, D] -> bf16 [T, S, D]."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        layer: int,
        *,
        ops: Ops,
        hashing: EngramHash,
        table: EngramTable,
    ) -> None:
        prefix = f"layers.{layer}.engram"
        self._engram, self._fused = ops.engram, ops.fused
        self._hashing = hashing.of(layer)
        self._table = table  # it, and not its planes alone: pinned memory is pinned while the table lives
        self._wkv = Linear8(parameters, f"{prefix}.wkv", ops=ops)
        self._rank = parameters.rank
        self._width = (config.hc_mult + 1) * config.hidden_size
        self._query_weight_SD = parameters.plain(f"{prefix}.q_weight")
        self._key_weight_SD = parameters.plain(f"{prefix}.k_weight")
        self._eps = config.rms_norm_eps
        self._ahead: tuple[Any, torch.cuda.Event] | None = None

    def __call__(self, x_TSD: Tensor, lookback_TN: Tensor) -> Tensor:
        rows = self.fetched() if self._ahead is not None else self._look_up(lookback_TN)
        return self._engram.inject(
            x_TSD,
            self._rank.gather(self._wkv.product(rows), width=self._width),
            query_weight_SD=self._query_weight_SD,
            key_weight_SD=self._key_weight_SD,
            eps=self._eps,
        )

    def fetch(self, lookback_TN: Tensor) -> None:
        """Begin the look-up of the next call, on the current CUDA stream."""
        self._ahead = (self._look_up(lookback_TN), torch.cuda.current_stream().record_event())

    def fetched(self) -> Any:
        """What ``fetch`` began, ready for the current CUDA stream; None if it began nothing."""
        if self._ahead is None:
            return None
        (rows, done), self._ahead = self._ahead, None
        torch.cuda.current_stream().wait_event(done)
        return rows

    def _look_up(self, lookback_TN: Tensor) -> Any:
        """int64 [T, N] -> the rows [T, C * D], quantised for the projection."""
        return self._fused.look_up_quantised(lookback_TN, self._hashing, self._table.planes)


class Prefetch:
    """Fetches the rows of all Engram layers at the beginning of a step."""

    def __init__(self, injections: Sequence[EngramInjection], device: torch.device) -> None:
        self._injections = injections
        self._cuda_stream = torch.cuda.Stream(device) if injections and device.type == "cuda" else None

    @contextlib.contextmanager
    def __call__(self, lookback_TN: Tensor) -> Generator[None]:
        """Inside, each injection finds its rows on their way; behind it, nothing of them is left running."""
        if self._cuda_stream is None or lookback_TN.shape[0] < AHEAD_ROWS:
            yield
            return
        self._cuda_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._cuda_stream):
            for injection in self._injections:
                injection.fetch(lookback_TN)
        try:
            yield
        finally:
            for injection in self._injections:
                injection.fetched()
