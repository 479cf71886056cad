"""One layer as a module: Engram where it has one, attention, MoE, each sublayer inside its hyper-connection.

The backbone's layers and the draft's are the same class with other parameters and another attention. Takes and gives ``State``;
what a row is, only the attention knows. Suffixes: T rows, S streams, D width, L query latent.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from flashstep.config.model import ModelConfig
from flashstep.kernels import Ops
from flashstep.model.engram import EngramInjection
from flashstep.model.indexer import Selection
from flashstep.model.linear import Norm
from flashstep.model.mhc import Site
from flashstep.model.moe import MoE
from flashstep.model.parameters import Parameters
from flashstep.model.rows import Rows

TILE_ROWS = 512  # measured 2026-11-30, see docs/log.md
AnyRows = TypeVar("AnyRows", contravariant=True)  # Rows in the backbone, DraftRows in the draft


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What passes from layer to layer.

    Streams bf16 [T, S, D], the read vector fp32 [T, S], the selection in force, and the features that the draft wants: bf16
    [T, D] of each of its target layers so far.
    """

    x_TSD: Tensor
    pre_TS: Tensor
    selection: Selection | None
    features: tuple[Tensor, ...] = ()

    @classmethod
    def first(cls, x_TSD: Tensor) -> "State":
        """Before the first site the streams are equal copies of the embedding: read one of them."""
        pre_TS = x_TSD.new_zeros(x_TSD.shape[:2], dtype=torch.float32)
        pre_TS[:, 0] = 1
        return cls(x_TSD=x_TSD, pre_TS=pre_TS, selection=None)

    def keep(self, kept: Tensor) -> "State":
        """The state of rows ``kept`` (int64); a selection does not outlive the last source's layer."""
        return State(
            x_TSD=self.x_TSD[kept],
            pre_TS=self.pre_TS[kept],
            selection=None,
            features=tuple(feature_TD[kept] for feature_TD in self.features),
        )


class Attention(Protocol[AnyRows]):
    """What a block asks of its attention; see ``attention`` and ``dspark``."""

    def publish(self, x_TD: Tensor, rows: AnyRows) -> Tensor: ...

    def attend(
        self, x_TD: Tensor, latent_TL: Tensor, rows: AnyRows, selection: Selection | None
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
        experts_per_token: int,
        engram: EngramInjection | None = None,
        captures: bool = False,
    ) -> None:
        self._engram = engram
        self._captures = captures
        self._attention_site = Site(config, parameters, f"{prefix}.hc_attn", ops=ops)
        self._attention_norm = Norm(parameters, f"{prefix}.attn_norm", eps=config.rms_norm_eps, ops=ops)
        self._attention = attention
        self._ffn_site = Site(config, parameters, f"{prefix}.hc_ffn", ops=ops)
        self._ffn_norm = Norm(parameters, f"{prefix}.ffn_norm", eps=config.rms_norm_eps, ops=ops)
        self._moe = MoE(config, parameters, f"{prefix}.ffn", ops=ops, experts_per_token=experts_per_token)

    def forward(self, state: State, rows: AnyRows) -> State:
        """All rows through the layer."""
        x_TSD, u_TD = self._enter(state, rows)
        latent_TL = self._attention.publish(u_TD, rows)
        return self._rest(replace(state, x_TSD=x_TSD), u_TD, latent_TL, rows)

    def forward_tail(self, state: State, rows: AnyRows, *, kept: Tensor, kept_rows: AnyRows) -> State:
        """All rows publish, only ``kept`` (int64 row numbers) go on: the last KV source under bounded replay."""
        x_TSD, u_TD = self._enter(state, rows)
        latent_TL = self._attention.publish(u_TD, rows)
        assert state.selection is None or state.selection.candidates_TM is None, (
            "candidates cannot precede the last source"
        )
        state = replace(state, x_TSD=x_TSD).keep(kept)
        if kept.numel() == 0:  # the chunk ends before anybody's last rows
            return state
        return self._rest(state, u_TD[kept], latent_TL[kept], kept_rows)

    def _enter(self, state: State, rows: AnyRows) -> tuple[Tensor, Tensor]:
        if self._engram is None:
            return _by_tiles(self._read_tile, state.x_TSD, state.pre_TS)
        assert isinstance(rows, Rows), "only the backbone has Engram layers"
        return _by_tiles(self._inject_tile, state.x_TSD, state.pre_TS, rows.lookback_TN)

    def _inject_tile(self, x_TSD: Tensor, pre_TS: Tensor, lookback_TN: Tensor) -> tuple[Tensor, Tensor]:
        assert self._engram is not None
        return self._read_tile(self._engram(x_TSD, lookback_TN), pre_TS)

    def _read_tile(self, x_TSD: Tensor, pre_TS: Tensor) -> tuple[Tensor, Tensor]:
        return x_TSD, self._attention_norm(self._attention_site.collapse(x_TSD, pre_TS))

    def _rest(self, state: State, u_TD: Tensor, latent_TL: Tensor, rows: AnyRows) -> State:
        """``state`` holds the streams that enter the attention."""
        features = state.features
        if self._captures:
            features = (*features, self._mean(state.x_TSD))
        y_TD, selection = self._attention.attend(u_TD, latent_TL, rows, state.selection)
        x_TSD, pre_TS = _by_tiles(self._leave_tile, state.x_TSD, y_TD)
        return State(x_TSD=x_TSD, pre_TS=pre_TS, selection=selection, features=features)

    def _leave_tile(self, x_TSD: Tensor, y_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Attention's output into the streams it was read from, and the FFN."""
        attention = self._attention_site.coefficients(x_TSD)
        x_TSD = self._attention_site.write(y_TD, x_TSD, attention)
        ffn = self._ffn_site.coefficients(x_TSD)
        u_TD = self._ffn_norm(self._ffn_site.collapse(x_TSD, attention.pre_TS))
        return self._ffn_site.write(self._moe(u_TD), x_TSD, ffn), ffn.pre_TS

    def _mean(self, x_TSD: Tensor) -> Tensor:
        """bf16 [T, D]: the streams' mean, which is a collapse with equal shares."""
        streams = x_TSD.shape[1]
        shares_TS = x_TSD.new_full(x_TSD.shape[:2], 1 / streams, dtype=torch.float32)
        return self._attention_site.collapse(x_TSD, shares_TS)


def _by_tiles(step: Callable[..., tuple[Tensor, Tensor]], *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """``step`` on ``TILE_ROWS`` rows at a time: no row sees another there, and what a tile works on stays in a core's cache."""
    tiles = [step(*tile) for tile in zip(*(tensor.split(TILE_ROWS) for tensor in tensors), strict=True)]
    if len(tiles) == 1:
        return tiles[0]
    first, second = zip(*tiles, strict=True)
    return torch.cat(first), torch.cat(second)
