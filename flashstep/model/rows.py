"""Rows: what every layer asks of the step's rows, worked out once a forward from ``ForwardBatch``.

Owns the places that rows write to, their rotations for both layer kinds, and the tables they read through. ``keep`` gives the
same for the rows that layers past the last KV source run on (spec/model.md 9). Suffixes: see ``batch``; P rotary pairs.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from flashstep.kernels import Ops
from flashstep.kernels.attention import AttentionRows
from flashstep.kernels.indexer import IndexRows
from flashstep.model.batch import ForwardBatch

Rotation = tuple[Tensor, Tensor]  # cosines and sines, fp32 [T, P]


RATIOS = (1, 2)  # tokens an entry, of whatever KV source


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a forward, or the kept ones of them."""

    attention: AttentionRows
    slot_T: Tensor  # int64, the runner slot (row of the tail rings)
    store_T: Tensor  # bool, whether the row writes global KV
    lookback_TN: Tensor
    window_rotation: Rotation  # ratio-0 layers
    compressed_rotation: Rotation  # layers that read compressed KV
    block_size: int

    @property
    def positions_T(self) -> Tensor:
        return self.attention.positions_T

    @cached_property
    def window_slot_T(self) -> Tensor:
        """int64 [T]: the place of each row's window record, -1 where its block is not held."""
        a = self.attention
        block = a.window_table_RB[a.request_T, a.positions_T // self.block_size]
        return torch.where(block >= 0, block * self.block_size + a.positions_T % self.block_size, -1)

    @cached_property
    def entry_slot_T(self) -> dict[int, Tensor]:
        """By ratio, int64 [T]: the place of the entry that each row closes, -1 where it closes none or must not write."""
        a = self.attention
        block = a.block_table_RB[a.request_T, a.positions_T // self.block_size]
        within, may_write = a.positions_T % self.block_size, (block >= 0) & self.store_T
        slots = {}
        for ratio in RATIOS:
            closes = (a.positions_T + 1) % ratio == 0
            place = block * (self.block_size // ratio) + within // ratio
            slots[ratio] = torch.where(may_write & closes, place, -1)
        return slots

    @cached_property
    def index_rows(self) -> dict[int, IndexRows]:
        """By ratio, what each row's indexer may score: the entries whose last token is not after the row."""
        a = self.attention
        return {
            ratio: IndexRows(
                request_T=a.request_T, visible_T=(a.positions_T + 1) // ratio, block_table_RB=a.block_table_RB
            )
            for ratio in RATIOS
        }

    def keep(self, kept: Tensor) -> "Rows":
        """The same for rows ``kept`` (int64, ascending) only."""
        a = self.attention
        return replace(
            self,
            attention=replace(a, positions_T=a.positions_T[kept], request_T=a.request_T[kept]),
            slot_T=self.slot_T[kept],
            store_T=self.store_T[kept],
            lookback_TN=self.lookback_TN[kept],
            window_rotation=(self.window_rotation[0][kept], self.window_rotation[1][kept]),
            compressed_rotation=(self.compressed_rotation[0][kept], self.compressed_rotation[1][kept]),
        )

    def from_positions(self, start_R: Tensor) -> Tensor:
        """int64: the rows at or after their request's ``start_R``."""
        a = self.attention
        return (a.positions_T >= start_R[a.request_T]).nonzero().flatten()

    def cut_windows(self, start_R: Tensor) -> "Rows":
        """The same rows with windows that begin at ``start_R`` at the earliest: before it nobody left records."""
        start = torch.maximum(self.attention.window_start_R, start_R)
        return replace(self, attention=replace(self.attention, window_start_R=start))


def rows_of(
    batch: ForwardBatch,
    *,
    window_frequencies: Tensor,
    compressed_frequencies: Tensor,
    block_size: int,
    ops: Ops,
) -> Rows:
    """Work the rows of ``batch`` out."""
    rotations = [
        ops.norm_rope.angles(batch.positions_T, f) for f in (window_frequencies, compressed_frequencies)
    ]
    return Rows(
        attention=AttentionRows(
            positions_T=batch.positions_T,
            request_T=batch.request_T,
            window_table_RB=batch.window_table_RB,
            window_start_R=batch.window_start_R,
            block_table_RB=batch.block_table_RB,
        ),
        slot_T=batch.slot_R[batch.request_T],
        store_T=batch.store_T,
        lookback_TN=batch.lookback_TN,
        window_rotation=rotations[0],
        compressed_rotation=rotations[1],
        block_size=block_size,
    )
