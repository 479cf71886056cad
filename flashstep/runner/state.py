"""What the device knows of each slot, so that a step of decoding needs nothing from the host but which slots decode.

``DecodeState`` owns one row of numbers a slot (newest token, length, drafts, sampling parameters, ..), both block tables, and the
inbox in which a step's own numbers arrive; and what of all that the device has been told. ``tell`` sends what has changed since:
in steady state that is one copy. A step (``decode``) reads and advances the rows itself. Slot -1 is nobody's: rows that pad a
step have it, its tables are empty and it may have no token, so they write nothing.
Suffixes: ``kernels.decode``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashstep.kernels.decode import NO_DRAFT, Fields
from flashstep.runner.batch import BatchBuilder
from flashstep.runner.histories import ABSENT, History, Slots
from flashstep.runner.staging import send, to_device

NOBODY = -1
NEWS = 4  # table entries a request that the inbox has place for: what a step of decoding brings, where blocks hold several rows


class Letter(NamedTuple):
    """What a step reads of the inbox: slots, the drafts that each verifies at most, and news of the tables [2, U]."""

    slot_R: Tensor
    bound_R: Tensor
    news_2U: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """Rows of the state, or copies of some, field by field (``kernels.decode.Fields``): views, int64 [R] but for the names."""

    newest_R: Tensor
    length_R: Tensor
    outputs_R: Tensor
    room_R: Tensor
    drafts_RK: Tensor
    previous_RN: Tensor
    temperature_R: Tensor  # fp64, and the next two
    top_p_R: Tensor
    min_p_R: Tensor
    seed_R: Tensor
    top_k_R: Tensor
    window_start_R: Tensor

    @classmethod
    def of(cls, rows_RF: Tensor, fields: Fields) -> "Numbers":
        """The views of ``rows_RF``."""
        newest_R, length_R, outputs_R, room_R = rows_RF[:, :4].unbind(1)
        seed_R, top_k_R, window_start_R = rows_RF[:, fields.fixed + 3 :].unbind(1)
        temperature_R, top_p_R, min_p_R = (
            rows_RF[:, fields.fixed : fields.fixed + 3].view(torch.float64).unbind(1)
        )
        return cls(
            newest_R=newest_R,
            length_R=length_R,
            outputs_R=outputs_R,
            room_R=room_R,
            drafts_RK=rows_RF[:, 4 : fields.previous],
            previous_RN=rows_RF[:, fields.previous : fields.fixed],
            temperature_R=temperature_R,
            top_p_R=top_p_R,
            min_p_R=min_p_R,
            seed_R=seed_R,
            top_k_R=top_k_R,
            window_start_R=window_start_R,
        )


class DecodeState:
    """See the module's docstring. ``batches`` knows of look-back ids, as for steps that the host resolves.

    Under bounded replay nothing is trimmed: rows behind a prompt do not look back to before its last window.

    Tables reach ``drafts`` positions past ``max_model_len``: rows of drafts that a request has no room for are run, and thrown
    away.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        drafts: int,
        batches: BatchBuilder,
    ) -> None:
        device = batches.device
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.drafts = drafts
        self.fields = Fields(drafts=drafts, lookback=batches.lookback)
        self.device = device
        self._batches = batches
        self.columns = -(-(max_model_len + drafts) // block_size)
        self.rows_SF = torch.zeros(num_slots + 1, self.fields.count, dtype=torch.int64, device=device)
        self.tables_2SB = torch.full(
            (2, num_slots + 1, self.columns), ABSENT, dtype=torch.int64, device=device
        )
        self.inbox = torch.zeros(_inbox_size(num_slots), dtype=torch.int64, device=device)
        nobody = self.numbers(self.rows_SF[NOBODY:])
        nobody.length_R.fill_(1)
        nobody.drafts_RK.fill_(NO_DRAFT)
        nobody.previous_RN.fill_(batches.pad)
        nobody.top_p_R.fill_(1.0)
        self._told = np.zeros((2, num_slots), dtype=np.int64)  # table entries that the device has
        self._taken = np.zeros(num_slots, dtype=bool)  # by somebody new: the device's tables are another's
        self._stale = np.ones(num_slots, dtype=bool)  # the row is not what the history says

    @property
    def bytes(self) -> int:
        """Device memory that it takes."""
        tensors = (self.rows_SF, self.tables_2SB, self.inbox)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def numbers(self, rows_RF: Tensor) -> Numbers:
        """``rows_RF``, rows of this state or copies of some, field by field."""
        return Numbers.of(rows_RF, self.fields)

    # ---- from the host -------------------------------------------------------------------------------------------

    def take(self, slot: int) -> None:
        """Somebody new sits in ``slot``: nothing that the device knows of it holds."""
        self._told[:, slot] = 0
        self._taken[slot] = self._stale[slot] = True

    def outdate(self, slot: int) -> None:
        """The host has moved ``slot``'s request on by itself."""
        self._stale[slot] = True

    def tell(self, chosen: Sequence[int], bounds: Sequence[int], *, slots: Slots, requests: int) -> None:
        """Queue all that a step of the slots ``chosen`` needs: what has changed, and in the inbox, padded to ``requests``, which
        slots they are and how many drafts each verifies at most (``bounds``). Histories of stale slots must be up to date.
        """
        here = np.array(chosen, dtype=np.int64)
        self._clear(here[self._taken[here]])
        self._refresh([slot for slot in chosen if self._stale[slot]], slots)
        places, blocks = self._news(here, slots)
        if len(places) > NEWS * requests:
            where = to_device(places, self.device)
            self.tables_2SB.view(-1)[where] = to_device(blocks, self.device)
            places, blocks = places[:0], blocks[:0]
        letter = self.blank(requests)
        news = letter[2 * requests :].view(2, -1)
        letter[: len(here)] = torch.from_numpy(here)
        letter[requests : requests + len(here)] = torch.tensor(bounds)
        news[0, : len(places)] = torch.from_numpy(places)
        news[1, : len(places)] = torch.from_numpy(blocks)
        send(letter, self.inbox[: len(letter)])

    def blank(self, requests: int) -> Tensor:
        """A letter for the inbox in which nobody decodes and nothing is new, int64, on the host."""
        letter = torch.full((_inbox_size(requests),), ABSENT, dtype=torch.int64)
        letter[2 * requests : (2 + NEWS) * requests] = (
            self.num_slots * self.columns
        )  # nobody's first entry: ABSENT already
        return letter

    def _clear(self, taken: np.ndarray) -> None:
        if len(taken):
            self.tables_2SB[:, to_device(taken, self.device)] = ABSENT
            self._taken[taken] = False

    def _refresh(self, stale: Sequence[int], slots: Slots) -> None:
        if not stale:
            return
        rows = np.stack([self._row(slot, slots.holder(slot), slots) for slot in stale])
        where = np.array(stale, dtype=np.int64)
        self.rows_SF[to_device(where, self.device)] = to_device(rows, self.device)
        self._stale[where] = False

    def _row(self, slot: int, history: History, slots: Slots) -> np.ndarray:
        """int64 [F]; floats as their bits."""
        params, length = history.request.params, history.length
        first = max(length - self.fields.lookback, 0)
        *before, newest = history.tokens(first, length)
        pads = [self._batches.pad] * (self.fields.lookback - 1 - len(before))
        previous = pads + self._batches.token_map[before].tolist()
        drafts = () if history.proposal is None else history.proposal.tokens[: self.drafts]
        reals = np.array([params.temperature, params.top_p, params.min_p], dtype=np.float64)
        return np.array(
            [
                newest,
                length,
                len(history.output),
                max(history.room(self.max_model_len), 0),
                *drafts,
                *[NO_DRAFT] * (self.drafts - len(drafts)),
                *previous,
                *reals.view(np.int64),
                params.seed or 0,  # None only where nothing is drawn
                params.top_k,
                slots.window_start[slot],
            ],
            dtype=np.int64,
        )

    def _news(self, here: np.ndarray, slots: Slots) -> tuple[np.ndarray, np.ndarray]:
        """Table entries that the device lacks: where they stand in the flat tables, and the blocks."""
        lacking = slots.filled[:, here] - self._told[:, here]
        places, blocks = [], []
        for kind, which in np.argwhere(lacking > 0):
            slot = here[which]
            known, filled = self._told[kind, slot], slots.filled[kind, slot]
            base = (kind * (self.num_slots + 1) + slot) * self.columns
            places.append(np.arange(base + known, base + filled))
            blocks.append((slots.blocks, slots.window_blocks)[kind][slot, known:filled])
            self._told[kind, slot] = filled
        if not places:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        return np.concatenate(places), np.concatenate(blocks)

    def letter(self, requests: int) -> Letter:
        """The inbox as a step of ``requests`` requests reads it, on the device."""
        letter = self.inbox[: _inbox_size(requests)]
        return Letter(letter[:requests], letter[requests : 2 * requests], letter[2 * requests :].view(2, -1))


def _inbox_size(requests: int) -> int:
    return 2 * requests + 2 * NEWS * requests
