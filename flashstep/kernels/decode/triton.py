"""Rows, verdict and drafts of a decoding step in Triton: a program a request, beside programs that copy its block tables."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashstep.kernels.decode import Fields, Judged, Laid

NEWS = 256  # table entries a program writes
COLUMNS = 1024  # of a block table that a program copies


@triton.jit
def _receive(tables_ptr, places_ptr, blocks_ptr, count, BLOCK: tl.constexpr):
    """Program (part,): news into the tables."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = at < count
    tl.store(
        tables_ptr + tl.load(places_ptr + at, mask=held, other=0),
        tl.load(blocks_ptr + at, mask=held, other=0),
        mask=held,
    )


@triton.jit
def _token(row_ptr, place, allowed, held):
    """A request's token at each of some places, the newest one's first; -1 where none is verified."""
    token = tl.load(row_ptr + tl.where(place == 0, 0, 3 + place), mask=held, other=-1)
    return tl.where((place == 0) | (place - 1 < allowed), token, -1)


@triton.jit
def _lay_out(
    rows_ptr, tables_ptr, slot_ptr, bound_ptr, token_map_ptr,
    numbers_ptr, drafts_ptr, compressed_ptr, ids_ptr, positions_ptr, request_ptr, store_ptr, lookback_ptr,
    temperature_ptr, seed_ptr, output_ptr, out_tables_ptr,
    slots, columns,
    FIELDS: tl.constexpr, PREVIOUS: tl.constexpr, FIXED: tl.constexpr, LOOKBACK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Program (request, part): part 0 lays out the request's rows, the others copy parts of its tables."""
    request, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_ptr + request)
    slot = tl.where(slot < 0, slots - 1, slot)
    if part > 0:
        column = (part - 1) * BLOCK_B + tl.arange(0, BLOCK_B)
        here = column < columns
        for kind in tl.static_range(2):
            block = tl.load(tables_ptr + (kind * slots + slot) * columns + column, mask=here)
            out = (kind * tl.num_programs(0) + request).to(tl.int64) * columns
            tl.store(out_tables_ptr + out + column, block, mask=here)
    else:
        row_ptr = rows_ptr + slot * FIELDS
        field = tl.arange(0, BLOCK_F)
        inside = field < FIELDS
        tl.store(numbers_ptr + request * FIELDS + field, tl.load(row_ptr + field, mask=inside), mask=inside)
        allowed = tl.minimum(tl.load(bound_ptr + request), tl.load(row_ptr + 3) - 1)
        place = tl.arange(0, BLOCK_T)
        held = place < ROWS
        token = _token(row_ptr, place, allowed, held)
        known = tl.maximum(token, 0)
        at = request * ROWS + place
        tl.store(drafts_ptr + request * (ROWS - 1) + place - 1, token, mask=held & (place > 0))
        tl.store(ids_ptr + at, known, mask=held)
        tl.store(positions_ptr + at, tl.load(row_ptr + 1) - 1 + place, mask=held)
        tl.store(request_ptr + at, (place * 0 + request).to(tl.int64), mask=held)
        tl.store(store_ptr + at, (token >= 0).to(tl.int8), mask=held)
        tl.store(temperature_ptr + at, tl.load(row_ptr + FIXED) + place * 0, mask=held)
        tl.store(seed_ptr + at, tl.load(row_ptr + FIXED + 3) + place * 0, mask=held)
        tl.store(output_ptr + at, tl.load(row_ptr + 2) + place, mask=held)
        compressed = tl.load(token_map_ptr + known, mask=held, other=0)
        before = tl.arange(0, BLOCK_N)
        base = request * (LOOKBACK + ROWS - 1)
        tl.store(
            compressed_ptr + base + before,
            tl.load(row_ptr + PREVIOUS + before, mask=before < LOOKBACK - 1, other=0),
            mask=before < LOOKBACK - 1,
        )
        tl.store(compressed_ptr + base + LOOKBACK - 1 + place, compressed, mask=held)
        back = (
            place[:, None] - before[None, :]
        )  # the place of the token that stands so far before; below 0: a previous one
        wanted = held[:, None] & (before < LOOKBACK)[None, :]
        among = tl.maximum(_token(row_ptr, tl.maximum(back, 0), allowed, wanted), 0)
        among = tl.load(token_map_ptr + among, mask=wanted & (back >= 0), other=0)
        earlier = tl.load(row_ptr + PREVIOUS + LOOKBACK - 1 + back, mask=wanted & (back < 0), other=0)
        tl.store(
            lookback_ptr + at[:, None] * LOOKBACK + before[None, :],
            tl.where(back >= 0, among, earlier),
            mask=wanted,
        )


@triton.jit
def _judge(
    rows_ptr, numbers_ptr, drafts_ptr, compressed_ptr, targets_ptr, slot_ptr, lot_ptr,
    newest_ptr, position_ptr, outcome_ptr, slots,
    FIELDS: tl.constexpr, PREVIOUS: tl.constexpr, LOOKBACK: tl.constexpr, ROWS: tl.constexpr, KEPT: tl.constexpr,
    BY_LOT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (request,): how many drafts stand, and what follows from it."""
    request = tl.program_id(0)
    slot = tl.load(slot_ptr + request)
    slot = tl.where(slot < 0, slots - 1, slot)
    numbers_ptr += request * FIELDS
    newest, length = tl.load(numbers_ptr), tl.load(numbers_ptr + 1)
    outputs, room = tl.load(numbers_ptr + 2), tl.load(numbers_ptr + 3)
    place = tl.arange(0, BLOCK_T)
    held = place < ROWS - 1
    draft = tl.load(drafts_ptr + request * (ROWS - 1) + place, mask=held, other=-1)
    target = tl.load(targets_ptr + request * ROWS + place, mask=place < ROWS, other=0)
    stands = (draft >= 0) & (draft == target)
    if BY_LOT:
        lot = tl.load(lot_ptr + request * (ROWS - 1) + place, mask=held, other=0)
        stands = (draft >= 0) & (lot != 0)
    accepted = tl.min(
        tl.where(stands, ROWS, place)
    )  # the first that falls; the place behind the last never stands
    ending = tl.sum(tl.where(place == accepted, target, 0))
    goes_on = room > 0
    steps = tl.where(goes_on, accepted + 1, 0)
    newest = tl.where(goes_on, ending, newest)
    row_ptr = rows_ptr + slot * FIELDS
    tl.store(row_ptr, newest)
    tl.store(row_ptr + 1, length + steps)
    tl.store(row_ptr + 2, outputs + steps)
    tl.store(row_ptr + 3, room - steps)
    before = tl.arange(0, BLOCK_N)
    inside = before < LOOKBACK - 1
    compressed = tl.load(compressed_ptr + request * (LOOKBACK + ROWS - 1) + steps + before, mask=inside)
    tl.store(row_ptr + PREVIOUS + before, compressed, mask=inside)
    tl.store(newest_ptr + request, newest)
    tl.store(position_ptr + request, length + steps - 1)
    outcome_ptr += request * (2 + ROWS + KEPT)
    tl.store(outcome_ptr, steps.to(tl.int64))
    tl.store(outcome_ptr + 1, tl.sum((held & (draft >= 0)).to(tl.int64)))
    tl.store(outcome_ptr + 2 + place, tl.where(place < accepted, draft, target), mask=place < ROWS)
    kept = tl.arange(0, BLOCK_K)
    tl.store(outcome_ptr + 2 + ROWS + kept, (kept * 0 - 1).to(tl.int64), mask=kept < KEPT)


@triton.jit
def _keep_drafts(
    rows_ptr, outcome_ptr, drafts_ptr, slot_ptr, slots, outcome_stride, proposed,
    FIELDS: tl.constexpr, KEPT: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (request,): its drafts into its row and its outcome."""
    request = tl.program_id(0)
    slot = tl.load(slot_ptr + request)
    row_ptr = rows_ptr + tl.where(slot < 0, slots - 1, slot) * FIELDS
    kept = tl.arange(0, BLOCK_K)
    draft = tl.load(drafts_ptr + request * proposed + kept, mask=kept < proposed, other=-1)
    draft = tl.where(tl.load(row_ptr + 3) > 1, draft, -1)
    tl.store(row_ptr + 4 + kept, draft, mask=kept < KEPT)
    tl.store(outcome_ptr + (request + 1) * outcome_stride - KEPT + kept, draft, mask=kept < KEPT)


def lay_out(
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
    """See ``Decode.lay_out``."""
    assert rows_SF.is_contiguous() and tables_2SB.is_contiguous() and news_2U.is_contiguous()
    requests, rows, (_, slots, columns) = slot_R.shape[0], 1 + verified, tables_2SB.shape
    news = news_2U.shape[1]
    if news:
        _receive[(triton.cdiv(news, NEWS),)](tables_2SB, news_2U[0], news_2U[1], news, BLOCK=NEWS)

    def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=rows_SF.device)

    laid = Laid(
        numbers_RF=new(requests, fields.count),
        drafts_RW=new(requests, verified),
        compressed_RX=new(requests, fields.lookback + verified),
        input_ids_T=new(requests * rows),
        positions_T=new(requests * rows),
        request_T=new(requests * rows),
        store_T=new(requests * rows, dtype=torch.bool),
        lookback_TN=new(requests * rows, fields.lookback),
        temperature_T=new(requests * rows, dtype=torch.float64),
        seed_T=new(requests * rows),
        output_T=new(requests * rows),
        tables_2RB=new(2, requests, columns),
    )
    _lay_out[(requests, 1 + triton.cdiv(columns, COLUMNS))](
        rows_SF,
        tables_2SB,
        slot_R,
        bound_R,
        token_map_V,
        *laid[:6],
        laid.store_T.view(torch.int8),
        laid.lookback_TN,
        laid.temperature_T.view(torch.int64),
        *laid[9:],
        slots,
        columns,
        FIELDS=fields.count,
        PREVIOUS=fields.previous,
        FIXED=fields.fixed,
        LOOKBACK=fields.lookback,
        ROWS=rows,
        BLOCK_F=triton.next_power_of_2(fields.count),
        BLOCK_T=triton.next_power_of_2(max(rows, 2)),
        BLOCK_N=triton.next_power_of_2(max(fields.lookback, 2)),
        BLOCK_B=COLUMNS,
    )
    return laid


def judge(
    rows_SF: Tensor,
    laid: Laid,
    targets_T: Tensor,
    *,
    slot_R: Tensor,
    by_lot_RW: Tensor | None,
    fields: Fields,
) -> Judged:
    """See ``Decode.judge``."""
    requests, verified = laid.drafts_RW.shape
    rows = 1 + verified
    newest_R, position_R = torch.empty_like(slot_R), torch.empty_like(slot_R)
    outcome = slot_R.new_empty(requests, 2 + rows + fields.drafts)
    _judge[(requests,)](
        rows_SF,
        laid.numbers_RF,
        laid.drafts_RW,
        laid.compressed_RX,
        targets_T.contiguous(),
        slot_R,
        None if by_lot_RW is None else by_lot_RW.contiguous().view(torch.int8),
        newest_R,
        position_R,
        outcome,
        rows_SF.shape[0],
        FIELDS=fields.count,
        PREVIOUS=fields.previous,
        LOOKBACK=fields.lookback,
        ROWS=rows,
        KEPT=fields.drafts,
        BY_LOT=by_lot_RW is not None,
        BLOCK_T=triton.next_power_of_2(max(rows, 2)),
        BLOCK_N=triton.next_power_of_2(max(fields.lookback, 2)),
        BLOCK_K=triton.next_power_of_2(max(fields.drafts, 2)),
    )
    return Judged(newest_R=newest_R, position_R=position_R, outcome=outcome)


def keep_drafts(
    rows_SF: Tensor, outcome: Tensor, drafts_RP: Tensor, *, slot_R: Tensor, fields: Fields
) -> None:
    """See ``Decode.keep_drafts``."""
    if fields.drafts == 0:
        return
    _keep_drafts[(slot_R.shape[0],)](
        rows_SF,
        outcome,
        drafts_RP.contiguous(),
        slot_R,
        rows_SF.shape[0],
        outcome.shape[1],
        drafts_RP.shape[1],
        FIELDS=fields.count,
        KEPT=fields.drafts,
        BLOCK_K=triton.next_power_of_2(max(fields.drafts, 2)),
    )


_RELEASED = Fields(drafts=5, lookback=4)
_WORDS = (
    "rows_ptr", "tables_ptr", "slot_ptr", "bound_ptr", "token_map_ptr", "numbers_ptr", "drafts_ptr", "compressed_ptr", "ids_ptr",
    "positions_ptr", "request_ptr", "lookback_ptr", "temperature_ptr", "seed_ptr", "output_ptr", "out_tables_ptr", "targets_ptr",
    "newest_ptr", "position_ptr", "outcome_ptr", "places_ptr", "blocks_ptr",
)  # fmt: skip
_TYPES = {
    **dict.fromkeys(_WORDS, "*i64"),
    "store_ptr": "*i8",
    "lot_ptr": "*i8",
    **dict.fromkeys(("slots", "columns", "count", "outcome_stride", "proposed"), "i32"),
}
_SHAPE = {"FIELDS": _RELEASED.count, "PREVIOUS": _RELEASED.previous, "LOOKBACK": 4, "ROWS": 6}
_BLOCKS = {"BLOCK_T": 8, "BLOCK_N": 4}
AOT = (
    (_receive, _TYPES, {"BLOCK": NEWS}),
    (_lay_out, _TYPES, {**_SHAPE, "FIXED": _RELEASED.fixed, **_BLOCKS, "BLOCK_F": 32, "BLOCK_B": COLUMNS}),
    *(
        (_judge, _TYPES, {**_SHAPE, "KEPT": 5, "BY_LOT": by_lot, **_BLOCKS, "BLOCK_K": 8})
        for by_lot in (False, True)
    ),
    (_keep_drafts, _TYPES, {"FIELDS": _RELEASED.count, "KEPT": 5, "BLOCK_K": 8}),
)
