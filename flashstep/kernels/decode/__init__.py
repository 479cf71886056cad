"""What a step of decoding does before and behind the model: rows out of the slots' numbers, the verdict, numbers into the slots.

Owns the signatures and ``Fields``, where a slot's numbers stand in its row. Everything is int64 unless it says otherwise, fp64
numbers stand as their bits. A slot of -1 is nobody's: its row is the last, of room 0 and empty tables, and never changes. A draft
of -1 is none. Suffixes: S slots and nobody's, F fields, R requests, W drafts that a request verifies, T = 1 + W rows of one, K
drafts that it keeps, N look-back columns, B table columns, U table entries that are news, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashstep.kernels.registry import Cost, Family, Implementation

OPS = ("lay_out", "judge", "keep_drafts")
NO_DRAFT = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """Columns of a slot's row: newest token, length, outputs, room, then ``drafts`` drafts, the compressed ids of the
    ``lookback`` - 1 tokens before the newest (oldest first); and what a step leaves alone: fp64 temperature, top-p and min-p,
    seed, top-k, window start.
    """

    drafts: int
    lookback: int

    @property
    def previous(self) -> int:
        return 4 + self.drafts

    @property
    def fixed(self) -> int:
        """The first of those that a step leaves alone, the temperature."""
        return self.previous + self.lookback - 1

    @property
    def count(self) -> int:
        return self.fixed + 6


class Laid(NamedTuple):
    """The rows of a step, R * T of them where a name says T, and what their requests bring.

    ``numbers_RF`` are copies of the slots' rows, ``drafts_RW`` what is verified of their drafts, ``compressed_RX`` [R, N + W] the
    compressed ids of N - 1 tokens before the newest, of itself and of its drafts. ``store_T`` is bool: whether a row has a token.
    """

    numbers_RF: Tensor
    drafts_RW: Tensor
    compressed_RX: Tensor
    input_ids_T: Tensor
    positions_T: Tensor
    request_T: Tensor
    store_T: Tensor
    lookback_TN: Tensor
    temperature_T: Tensor  # fp64
    seed_T: Tensor
    output_T: Tensor  # the output position of what each row samples
    tables_2RB: Tensor


class Judged(NamedTuple):
    """What came of the rows: ``outcome`` [R, 2 + T + K] tells of each request how many tokens it has got, how many drafts were
    verified, and the tokens; and has place for the next drafts.
    """

    newest_R: Tensor
    position_R: Tensor  # of the newest token
    outcome: Tensor


class Decode(Family):
    """Public ops around the model of a decoding step."""

    TABLE = (
        *(
            Implementation(
                op=f"decode.{op}", module="flashstep.kernels.decode.triton", needs=frozenset({"sm90"})
            )
            for op in OPS
        ),
        *(Implementation(op=f"decode.{op}", module="flashstep.kernels.decode.reference") for op in OPS),
    )

    def lay_out(
        self,
        rows_SF: Tensor,
        tables_2SB: Tensor,
        *,
        slot_R: Tensor,
        bound_R: Tensor,
        news_2U: Tensor,
        token_map_V: Tensor,
        fields: Fields,
        verified: int,
    ) -> Laid:
        """Slots [R], the drafts that each may verify at most [R], and news [2, U] -> the step's rows.

        News are places in the flat ``tables_2SB`` (global, window) and the blocks that stand there from now on; they are written
        first. Of a request's drafts those are verified that its bound and its room allow.
        """
        assert slot_R.shape == bound_R.shape and tables_2SB.shape[1] == rows_SF.shape[0]
        assert rows_SF.shape[1] == fields.count and verified <= fields.drafts
        return self._loaded["lay_out"](
            rows_SF,
            tables_2SB,
            slot_R=slot_R,
            bound_R=bound_R,
            news_2U=news_2U,
            token_map_V=token_map_V,
            fields=fields,
            verified=verified,
        )

    def judge(
        self,
        rows_SF: Tensor,
        laid: Laid,
        targets_T: Tensor,
        *,
        slot_R: Tensor,
        by_lot_RW: Tensor | None,
        fields: Fields,
    ) -> Judged:
        """Sampled tokens [R * T] -> what stands; the slots' rows go on by it, but for their drafts.

        Drafts stand while they are what was sampled in their places, or while ``by_lot_RW`` (bool) says so. A request without
        room gets nothing.
        """
        assert targets_T.shape == laid.input_ids_T.shape and targets_T.dtype is torch.int64
        return self._loaded["judge"](
            rows_SF, laid, targets_T, slot_R=slot_R, by_lot_RW=by_lot_RW, fields=fields
        )

    def keep_drafts(
        self, rows_SF: Tensor, outcome: Tensor, drafts_RP: Tensor, *, slot_R: Tensor, fields: Fields
    ) -> None:
        """Proposed drafts [R, P] into the slots' rows and into ``outcome``, none where a request can have no token beyond one."""
        assert drafts_RP.shape[0] == slot_R.shape[0] and drafts_RP.shape[1] <= fields.drafts
        self._loaded["keep_drafts"](rows_SF, outcome, drafts_RP, slot_R=slot_R, fields=fields)


def lay_out_cost(*, requests: int, columns: int) -> Cost:
    """Both tables of each request in and out; the rest is small."""
    return Cost(bytes=32 * requests * columns, flops=0)


def judge_cost(*, requests: int, verified: int) -> Cost:
    """Targets and drafts in, tokens out."""
    return Cost(bytes=24 * requests * (1 + verified), flops=requests * verified)


def keep_drafts_cost(*, requests: int, drafts: int) -> Cost:
    """Drafts in, and out twice."""
    return Cost(bytes=24 * requests * drafts, flops=0)
