"""Rows: what every layer asks of the step's rows, worked out once a forward from ``ForwardBatch``, in one op.

Owns the places that rows write to, their rotations for all layer kinds, and the tables they read through. ``keep`` gives the
same for the rows that layers past the last KV source run on (spec/model.md 9). Suffixes: see ``batch``; P rotary pairs.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashstep.kernels import Ops
from flashstep.kernels.attention import AttentionRows
from flashstep.kernels.indexer import IndexRows
from flashstep.model.batch import ForwardBatch
from flashstep.model.rope import COMPRESSED, PAIR, WINDOW, Angles

Rotation = tuple[Tensor, Tensor]  # cosines and sines, fp32 [T, P]


RATIOS = (1, 2)  # tokens an entry, of whatever KV source


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a forward, or the kept ones of them; by ratio what depends on how many tokens an entry has."""

    attention: AttentionRows
    slot_T: Tensor  # int64, the runner slot (row of the tail rings)
    window_slot_T: Tensor  # int64, the place of the row's window record, -1 where its block is not held
    entry_slot_T: dict[
        int, Tensor
    ]  # int64, of the entry that the row closes; -1 where it closes none or must not write
    index_rows: dict[
        int, IndexRows
    ]  # what the row's indexer may score: the entries whose last token is not after it
    lookback_TN: Tensor
    window_rotation: Rotation  # ratio-0 layers
    compressed_rotation: Rotation  # layers that read compressed KV
    entry_rotation: dict[int, Rotation]  # of the first token of the entry that the row closes

    @property
    def positions_T(self) -> Tensor:
        return self.attention.positions_T

    def keep(self, kept: Tensor) -> "Rows":
        """The same for rows ``kept`` (int64, ascending) only, which publish nothing more."""
        a = self.attention
        return replace(
            self,
            attention=replace(a, positions_T=a.positions_T[kept], request_T=a.request_T[kept]),
            slot_T=self.slot_T[kept],
            window_slot_T=self.window_slot_T[kept],
            entry_slot_T={},
            index_rows={
                ratio: replace(rows, request_T=rows.request_T[kept], visible_T=rows.visible_T[kept])
                for ratio, rows in self.index_rows.items()
            },
            lookback_TN=self.lookback_TN[kept],
            window_rotation=(self.window_rotation[0][kept], self.window_rotation[1][kept]),
            compressed_rotation=(self.compressed_rotation[0][kept], self.compressed_rotation[1][kept]),
            entry_rotation={},
        )

    def cut_windows(self, start_R: Tensor) -> "Rows":
        """The same rows with windows that begin at ``start_R`` at the earliest: before it nobody left records."""
        start = torch.maximum(self.attention.window_start_R, start_R)
        return replace(self, attention=replace(self.attention, window_start_R=start))


def rows_of(batch: ForwardBatch, *, angles: Angles, block_size: int, ops: Ops) -> Rows:
    """Work the rows of ``batch`` out."""
    places = ops.fused.place_rows(
        batch.positions_T,
        batch.request_T,
        batch.store_T,
        slot_R=batch.slot_R,
        window_table_RB=batch.window_table_RB,
        block_table_RB=batch.block_table_RB,
        block_size=block_size,
        frequencies_AP=angles.frequencies_AP,
        back_A=angles.back_A,
    )
    rotations = list(zip(places.cos_ATP, places.sin_ATP, strict=True))
    return Rows(
        attention=AttentionRows(
            positions_T=batch.positions_T,
            request_T=batch.request_T,
            window_table_RB=batch.window_table_RB,
            window_start_R=batch.window_start_R,
            block_table_RB=batch.block_table_RB,
        ),
        slot_T=places.slot_T,
        window_slot_T=places.window_slot_T,
        entry_slot_T=dict(zip(RATIOS, places.entry_slot_T, strict=True)),
        index_rows={
            ratio: IndexRows(
                request_T=batch.request_T, visible_T=visible_T, block_table_RB=batch.block_table_RB
            )
            for ratio, visible_T in zip(RATIOS, places.visible_T, strict=True)
        },
        lookback_TN=batch.lookback_TN,
        window_rotation=rotations[WINDOW],
        compressed_rotation=rotations[COMPRESSED],
        entry_rotation={1: rotations[COMPRESSED], 2: rotations[PAIR]},
    )
