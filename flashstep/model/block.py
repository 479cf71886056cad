"""One layer as a module: Engram where it has one, attention, MoE, each sublayer behind its hyper-connection.

A layer is: boundary, publish, attend, boundary, MoE; what the MoE gives is written by the next layer's first boundary. The
backbone's layers and the draft's are the same class with other parameters and another attention. Takes and gives ``State``;
what a row is, only the attention knows. Suffixes: T rows, S streams, D width, M coefficients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.kernels import Ops
from flashstep.kernels.mhc import Entered, Hidden
from flashstep.model.engram import EngramInjection
from flashstep.model.indexer import Selection
from flashstep.model.mhc import Site, Streams
from flashstep.model.moe import MoE
from flashstep.model.parameters import Parameters
from flashstep.model.rows import Rows

TILE_ROWS = 512  # measured 2026-11-30, see docs/log.md
AnyRows = TypeVar("AnyRows", contravariant=True)  # Rows in the backbone, DraftRows in the draft


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What passes from layer to layer.

    The streams behind the last sublayer (before the first: the embedding's, bf16 [T, S, D]), the selection in force, and the
    features that the draft wants: bf16 [T, D] of each of its target layers so far.
    """

    streams: Streams | Tensor
    selection: Selection | None = None
    features: tuple[Tensor, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Inside:
    """What stands between a layer's first boundary and its second: the streams that enter the attention, and what it reads.

    ``latent`` is the attention's own: what ``publish`` made of it for ``attend``.
    """

    x_TSD: Tensor
    coefficients_TM: Tensor
    hidden: Hidden
    latent: Any
    features: tuple[Tensor, ...]

    def keep(self, kept: Tensor) -> "Inside":
        """The same for rows ``kept`` (int64) only."""
        return Inside(
            x_TSD=self.x_TSD[kept],
            coefficients_TM=self.coefficients_TM[kept],
            hidden=self.hidden.keep(kept),
            latent=self.latent[kept],
            features=tuple(feature_TD[kept] for feature_TD in self.features),
        )


class Attention(Protocol[AnyRows]):
    """What a block asks of its attention; see ``attention`` and ``dspark``."""

    def publish(self, hidden: Hidden, rows: AnyRows) -> Any: ...

    def attend(
        self, hidden: Hidden, latent: Any, rows: AnyRows, selection: Selection | None
    ) -> tuple[Tensor, Selection | None]: ...


class Block(Generic[AnyRows]):
    """The layer whose parameters begin with ``prefix``.

    ``captures``: the draft reads the mean of the streams that enter this layer's attention (spec/model.md 8.1).
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        prefix: str,
        *,
        ops: Ops,
        attention: Attention[AnyRows],
        moe: MoE,
        engram: EngramInjection | None = None,
        captures: bool = False,
    ) -> None:
        self._mhc = ops.mhc
        self._engram = engram
        self._captures = captures
        self._attention_site = Site(config, parameters, prefix, "attn", ops=ops)
        self._attention = attention
        self._ffn_site = Site(config, parameters, prefix, "ffn", ops=ops)
        self._moe = moe

    def forward(self, state: State, rows: AnyRows) -> State:
        """All rows through the layer."""
        return self._rest(self._publish(state, rows), rows, state.selection)

    def forward_tail(self, state: State, rows: AnyRows, *, kept: Tensor, kept_rows: AnyRows) -> State | None:
        """All rows publish, only ``kept`` (int64 row numbers) go on: the last KV source under bounded replay.

        None where nobody goes on: the chunk ends before anybody's last rows. A selection does not outlive this layer.
        """
        inside = self._publish(state, rows)
        assert state.selection is None or state.selection.candidates_TM is None, (
            "candidates cannot precede the last source"
        )
        if kept.numel() == 0:
            return None
        return self._rest(inside.keep(kept), kept_rows, None)

    def _publish(self, state: State, rows: AnyRows) -> Inside:
        x_TSD, (coefficients_TM, hidden, mean_TD) = self._enter(state.streams, rows)
        return Inside(
            x_TSD=x_TSD,
            coefficients_TM=coefficients_TM,
            hidden=hidden,
            latent=self._attention.publish(hidden, rows),
            features=state.features if mean_TD is None else (*state.features, mean_TD),
        )

    def _enter(self, streams: Streams | Tensor, rows: AnyRows) -> tuple[Tensor, Entered]:
        if self._engram is None:
            if isinstance(streams, Tensor):
                return _by_tiles(self._begin_tile, streams)
            return _by_tiles(self._boundary_tile, *streams)
        assert isinstance(rows, Rows), "only the backbone has Engram layers"
        if isinstance(streams, Tensor):
            return _by_tiles(self._begin_injected_tile, streams, rows.lookback_TN)
        return _by_tiles(self._inject_tile, *streams, rows.lookback_TN)

    def _begin_tile(self, x_TSD: Tensor) -> tuple[Tensor, Entered]:
        return x_TSD, self._attention_site.begin(x_TSD, mean=self._captures)

    def _begin_injected_tile(self, x_TSD: Tensor, lookback_TN: Tensor) -> tuple[Tensor, Entered]:
        assert self._engram is not None
        return self._begin_tile(self._engram(x_TSD.contiguous(), lookback_TN))

    def _boundary_tile(self, *streams: Tensor) -> tuple[Tensor, Entered]:
        return self._attention_site.boundary(Streams(*streams), mean=self._captures)

    def _inject_tile(
        self, y_TD: Tensor, x_TSD: Tensor, coefficients_TM: Tensor, lookback_TN: Tensor
    ) -> tuple[Tensor, Entered]:
        assert self._engram is not None
        x_TSD = self._engram(self._mhc.write(y_TD, x_TSD, coefficients_TM), lookback_TN)
        return x_TSD, self._attention_site.enter(x_TSD, coefficients_TM, mean=self._captures)

    def _rest(self, inside: Inside, rows: AnyRows, selection: Selection | None) -> State:
        y_TD, selection = self._attention.attend(inside.hidden, inside.latent, rows, selection)
        streams = _by_tiles(self._ffn_tile, y_TD, inside.x_TSD, inside.coefficients_TM)
        return State(streams=Streams(*streams), selection=selection, features=inside.features)

    def _ffn_tile(self, *streams: Tensor) -> Streams:
        """Attention's output into the streams it was read from, and the FFN."""
        x_TSD, entered = self._ffn_site.boundary(Streams(*streams))
        return Streams(self._moe(entered.hidden), x_TSD, entered.coefficients_TM)


def _by_tiles(step: Callable[..., Any], *tensors: Tensor) -> Any:
    """``step``, whose results are nested tuples of rows, on ``TILE_ROWS`` rows at a time on a CPU, and on all of them elsewhere.

    No row sees another there; on a CPU, what a tile works on stays in a core's cache.
    """
    tile_rows = TILE_ROWS if tensors[0].device.type == "cpu" else max(tensors[0].shape[0], 1)
    tiles = [step(*tile) for tile in zip(*(tensor.split(tile_rows) for tensor in tensors), strict=True)]
    return tiles[0] if len(tiles) == 1 else _joined(tiles)


def _joined(tiles: list[Any]) -> Any:
    first = tiles[0]
    if first is None or isinstance(first, Tensor):
        return None if first is None else torch.cat(tiles)
    parts = [_joined(list(part)) for part in zip(*tiles, strict=True)]
    return tuple(parts) if type(first) is tuple else type(first)(*parts)
