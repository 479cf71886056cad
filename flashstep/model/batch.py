"""ForwardBatch and DraftBatch: everything a forward, or a draft, reads besides weights and caches, in one argument.

Legend of shape suffixes: T rows of this step (all requests, concatenated), R requests in it, B columns of a block table,
N look-back columns. Rows of one request are consecutive and ascending in position.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """The inputs of one forward pass.

    input_ids_T        int64  token ids
    positions_T        int64  absolute positions in their sequences
    request_T          int64  which row of the tables below (0..R-1) a row belongs to
    slot_R             int64  the runner slot of each request (row of the tail rings)
    block_table_RB     int64  global block of each ``block_size`` tokens; -1 where none
    window_table_RB    int64  window block of each ``block_size`` tokens; -1 where none or no longer held
    window_start_R     int64  first position whose window record may be read (0; H - window after a bounded hit)
    store_T            bool   whether a row writes global KV (False for replayed rows)
    lookback_TN        int64  compressed token ids at t, t-1, .. (newest first, N = engram_max_ngram_size); blocked places
                              already hold the compressed PAD id (spec/model.md 6.4)
    tail_start_R       int64 or None  the first position that layers past the last KV source run on, and the first whose
                              window record they may read (spec/model.md 9); None: every row runs everywhere
    tail_rows          int64 or None  the rows at or after it; None: all of them
    counted_T          bool or None  whether a row has a token, where experts' loads are recorded; None: every row has one
    logit_rows         int64 or None  the rows whose logits are wanted, counted among those that run to the end; None: all of them
    """

    input_ids_T: Tensor
    positions_T: Tensor
    request_T: Tensor
    slot_R: Tensor
    block_table_RB: Tensor
    window_table_RB: Tensor
    window_start_R: Tensor
    store_T: Tensor
    lookback_TN: Tensor
    logit_rows: Tensor | None
    tail_start_R: Tensor | None = None
    tail_rows: Tensor | None = None
    counted_T: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftBatch:
    """The inputs of one draft: one block a request.

    anchor_R           int64  the newest token, which has not run through the target
    position_R         int64  its position n; positions before it have
    window_table_RB    int64  as in ``ForwardBatch``; must reach back to n - window
    window_start_R     int64  as in ``ForwardBatch``
    counted_R          bool or None  whether somebody has the block; None: all are somebody's
    """

    anchor_R: Tensor
    position_R: Tensor
    window_table_RB: Tensor
    window_start_R: Tensor
    counted_R: Tensor | None = None
