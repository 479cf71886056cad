"""Scores, candidate blocks and exact top-k in Triton, in three launches a tile of rows and without asking the device anything.

1. ``_runs`` cuts the rows into runs: at most ``RUN`` neighbours of one request, which look at the same keys.
2. ``_score_runs`` (or ``_score_candidates``, row by row) decodes each key tile once for a run and writes fp32 scores.
3. ``_choose`` finds the threshold of a row by its bits, eight at a time, and writes what lies above it in ascending order.
   Long rows of small batches are cut into parts first, whose best are then chosen among again.

Shapes of launches come from the block table's width; loops end at what a row sees. The score of (row, entry) is one fixed
sequence of operations, so that nothing depends on the batch, the run or the part: only sums in fp32 (dot products of exact
bf16 values, then heads) distinguish it from the reference's. The selection itself is exact: ties go to the lowest index, NaN
and -inf are never chosen.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashstep.kernels.indexer import IndexRows, Planes

SCORE_BYTES = 256 << 20  # fp32 scores alive at a time
RUN = 8  # rows that share a decoded key tile
KEYS_AT_ONCE = 128  # entries of one product
PROGRAMS = 1056  # score programs wanted in flight: 8 for each of 132 multiprocessors
PARTS = 264  # choosing programs wanted in flight
BLOCK, SMALL_BLOCK = 2048, 1024  # scores in registers while choosing
GROUP = 32  # channels of one MXFP4 scale
WARPS = 8  # of a choosing program


# ---- scores -------------------------------------------------------------------------------------------------------


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _runs(request_ptr, first_ptr, rows, capacity, RUN: tl.constexpr, BLOCK: tl.constexpr):
    """One program: the first row of each run into ``first`` [capacity + 1], then ``rows`` to the end.

    A run begins where the request changes, and ``RUN`` rows after the one before.
    """
    lane = tl.arange(0, BLOCK)
    last_change = 0
    found = 0
    for begin in range(0, rows, BLOCK):
        row = begin + lane
        inside = row < rows
        request = tl.load(request_ptr + row, mask=inside, other=-1)
        before = tl.load(request_ptr + row - 1, mask=inside & (row > 0), other=-1)
        changes = inside & ((row == 0) | (request != before))
        change = tl.associative_scan(tl.where(changes, row, 0), 0, _larger)
        change = tl.maximum(change, last_change)
        heads = inside & ((row - change) % RUN == 0)
        number = found + tl.cumsum(heads.to(tl.int32), 0) - 1
        tl.store(first_ptr + number, row, mask=heads)
        last_change = tl.max(change, 0)
        found += tl.sum(heads.to(tl.int32), 0)
    for begin in range(0, capacity + 1, BLOCK):
        number = begin + lane
        tl.store(
            first_ptr + number, tl.zeros_like(number) + rows, mask=(number >= found) & (number <= capacity)
        )


@triton.jit
def _decoded(code, scale, KEYS: tl.constexpr, HALF: tl.constexpr):
    """bf16 [KEYS, HALF] of E2M1 codes int32 [KEYS, G, 16] and fp32 scales [KEYS, G]; exact.

    Sign and magnitude of a code, put on top of fp16's exponent and mantissa, are its value times 2^-14.
    """
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    return tl.reshape((value * scale[:, :, None]).to(tl.bfloat16), (KEYS, HALF))


@triton.jit
def _key_tile(
    data_ptr,
    scale_ptr,
    table_ptr,
    entry,
    inside,
    data_stride,
    scale_stride,
    CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Even and odd channels (bf16 [KEYS, CHANNELS / 2] each) of the keys of ``entry`` [KEYS] through one request's table."""
    GROUPS: tl.constexpr = CHANNELS // 32
    block = tl.load(table_ptr + entry // SLOTS, mask=inside, other=-1)
    inside &= block >= 0
    block = tl.maximum(block, 0).to(tl.int64)
    place = entry % SLOTS
    group = tl.arange(0, GROUPS)
    data_ptr += (block * data_stride + place * (CHANNELS // 2))[:, None, None]
    data_ptr += group[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    byte = tl.load(data_ptr, mask=inside[:, None, None], other=0).to(tl.int32)
    scale_ptr += (block * scale_stride + place * GROUPS)[:, None] + group[None, :]
    exponent = tl.load(scale_ptr, mask=inside[:, None], other=0).to(tl.int32)
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
    scale = tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    even = _decoded(byte & 15, scale, KEYS, CHANNELS // 2)
    odd = _decoded((byte >> 4) & 15, scale, KEYS, CHANNELS // 2)
    return even, odd


@triton.jit
def _row_scores(
    q_ptr, weight_ptr, even, odd, scale, HEADS: tl.constexpr, CHANNELS: tl.constexpr, HEAD_TILE: tl.constexpr
):
    """fp32 [KEYS] scores of one row, whose queries and head weights begin at the pointers. A NaN key gives NaN."""
    head = tl.arange(0, HEAD_TILE)
    there = head[:, None] < HEADS
    q = tl.load(q_ptr + head[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :], mask=there, other=0.0)
    q_even, q_odd = tl.split(tl.reshape(q, (HEAD_TILE, CHANNELS // 2, 2)))
    dots = tl.dot(even, tl.trans(q_even))
    dots = tl.dot(odd, tl.trans(q_odd), dots)
    dots = tl.where(dots < 0, 0.0, dots)
    weight = tl.load(weight_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32) * scale
    return tl.sum(dots * weight[None, :], axis=1)


@triton.jit
def _score_runs(
    q_ptr,
    weight_ptr,
    data_ptr,
    scale_ptr,
    request_ptr,
    visible_ptr,
    table_ptr,
    first_ptr,
    score_ptr,
    peak_ptr,
    table_stride,
    data_stride,
    scale_stride,
    score_stride,
    peak_stride,
    scale,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    RUN: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """Program (run, i): key tiles i, i + n, ... of what the run sees, each decoded once and scored for every row of it.

    Scores of entries that a row does not see are not written. With ``peak_ptr``, also the best score of each block of
    ``MEMBERS`` entries: +inf for the block of the newest visible one, -inf where a block holds no number.
    """
    first = tl.load(first_ptr + tl.program_id(0))
    end = tl.load(first_ptr + tl.program_id(0) + 1)
    lane = tl.arange(0, RUN)
    most = tl.max(tl.load(visible_ptr + first + lane, mask=first + lane < end, other=0), 0).to(tl.int32)
    request = tl.load(request_ptr + first, mask=first < end, other=0).to(tl.int64)
    table_ptr += tl.maximum(request, 0) * table_stride
    for begin in range(tl.program_id(1) * KEY_TILE, most, tl.num_programs(1) * KEY_TILE):
        entry = begin + tl.arange(0, KEY_TILE)
        even, odd = _key_tile(
            data_ptr,
            scale_ptr,
            table_ptr,
            entry,
            entry < most,
            data_stride,
            scale_stride,
            CHANNELS,
            SLOTS,
            KEY_TILE,
        )
        for row in range(first, end):
            at = tl.cast(row, tl.int64)
            visible = tl.load(visible_ptr + at).to(tl.int32)
            score = _row_scores(
                q_ptr + at * (HEADS * CHANNELS),
                weight_ptr + at * HEADS,
                even,
                odd,
                scale,
                HEADS,
                CHANNELS,
                HEAD_TILE,
            )
            sees = entry < visible
            tl.store(score_ptr + at * score_stride + entry, score, mask=sees)
            if peak_ptr is not None:
                valid = tl.where(sees & (score == score), score, float("-inf"))
                peak = tl.max(tl.reshape(valid, (KEY_TILE // MEMBERS, MEMBERS)), axis=1)
                block = begin // MEMBERS + tl.arange(0, KEY_TILE // MEMBERS)
                peak = tl.where(block == (visible - 1) // MEMBERS, float("inf"), peak)
                tl.store(peak_ptr + at * peak_stride + block, peak, mask=block * MEMBERS < visible)


@triton.jit
def _places(candidate_ptr, CANDIDATES: tl.constexpr, CANDIDATE_TILE: tl.constexpr, MEMBERS: tl.constexpr):
    """How many places the candidate blocks of a row have: those that are not -1 (all in front), ``MEMBERS`` each."""
    lane = tl.arange(0, CANDIDATE_TILE)
    block = tl.load(candidate_ptr + lane, mask=lane < CANDIDATES, other=-1)
    return tl.sum((block >= 0).to(tl.int32), 0) * MEMBERS


@triton.jit
def _score_candidates(
    q_ptr,
    weight_ptr,
    data_ptr,
    scale_ptr,
    request_ptr,
    visible_ptr,
    table_ptr,
    candidate_ptr,
    score_ptr,
    table_stride,
    data_stride,
    scale_stride,
    score_stride,
    scale,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    CANDIDATE_TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    """Program (row, i): place tiles i, i + n, ... of the row's candidate blocks; -inf for members that it does not see."""
    row = tl.program_id(0).to(tl.int64)
    candidate_ptr += row * CANDIDATES
    places = _places(candidate_ptr, CANDIDATES, CANDIDATE_TILE, MEMBERS)
    visible = tl.load(visible_ptr + row).to(tl.int32)
    table_ptr += tl.maximum(tl.load(request_ptr + row).to(tl.int64), 0) * table_stride
    for begin in range(tl.program_id(1) * KEY_TILE, places, tl.num_programs(1) * KEY_TILE):
        place = begin + tl.arange(0, KEY_TILE)
        inside = place < places
        block = tl.load(candidate_ptr + place // MEMBERS, mask=inside, other=0)
        entry = block * MEMBERS + place % MEMBERS
        sees = inside & (entry < visible)
        even, odd = _key_tile(
            data_ptr, scale_ptr, table_ptr, entry, sees, data_stride, scale_stride, CHANNELS, SLOTS, KEY_TILE
        )
        score = _row_scores(
            q_ptr + row * (HEADS * CHANNELS),
            weight_ptr + row * HEADS,
            even,
            odd,
            scale,
            HEADS,
            CHANNELS,
            HEAD_TILE,
        )
        tl.store(score_ptr + row * score_stride + place, tl.where(sees, score, float("-inf")), mask=inside)


# ---- choosing -----------------------------------------------------------------------------------------------------


@triton.jit
def _order_keys(score_ptr, place_ptr, at, end):
    """uint32 keys that sort like the scores at ``at`` (0 for what is never chosen), and the places of these scores.

    With ``place_ptr`` the scores are those of a list of places, -1 for none.
    """
    inside = at < end
    place = at
    if place_ptr is not None:
        place = tl.load(place_ptr + at, mask=inside, other=-1)
        inside = place >= 0
    score = tl.load(score_ptr + place, mask=inside, other=float("-inf"))
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # the two zeros are equal
    key = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    return tl.where(score > float("-inf"), key, 0), place  # NaN compares false


@triton.jit
def _threshold(score_ptr, place_ptr, begin, end, count, BLOCK: tl.constexpr):
    """The key of the last score that is chosen, and how many that equal it are; 0 and 0 where all valid ones are chosen.

    Eight bits a pass, from the top: how many keys that begin with the bits found so far have which next ones.
    """
    lane = tl.arange(0, BLOCK)
    digit = tl.arange(0, 256)
    prefix = tl.zeros((), tl.uint32)
    need = count
    few = False
    for step in tl.static_range(4):
        counts = tl.zeros((256,), tl.int32)
        for low in range(begin, end, BLOCK):
            key, _ = _order_keys(score_ptr, place_ptr, low + lane, end)
            matches = key > 0
            if step > 0:
                matches &= (key >> (32 - 8 * step)) == prefix
            next_bits = (key >> (24 - 8 * step)) & 255
            counts += tl.histogram(next_bits.to(tl.int32), 256, mask=matches)
        at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        found = tl.sum((at_least >= need).to(tl.int32), 0) - 1
        if step == 0:
            few = found < 0
        found = tl.maximum(found, 0)
        need -= tl.sum(tl.where(digit == found, at_least - counts, 0), 0)
        prefix = (prefix << 8) | found.to(tl.uint32)
    return tl.where(few, 0, prefix), tl.where(few, 0, need)


@triton.jit
def _choose(
    score_ptr,
    place_ptr,
    visible_ptr,
    candidate_ptr,
    out_ptr,
    score_stride,
    limit,
    count,
    DIVISOR: tl.constexpr,
    MEMBERS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    CANDIDATE_TILE: tl.constexpr,
    PARTS: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, part): the best ``count`` places of the part of the row, ascending, -1 filled.

    A row has ``visible`` / ``DIVISOR`` places (rounded up; all of ``limit`` without ``visible_ptr``), or with ``candidate_ptr``
    those of its candidate blocks. With ``place_ptr`` the row is the list of what its ``PARTS`` parts gave before (then the
    grid has one part). The last launch names entries instead of places, and everything where no more than ``count`` is
    visible, whatever the scores.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    places = limit
    whole = limit
    everything = False
    if visible_ptr is not None:
        visible = tl.load(visible_ptr + row).to(tl.int32)
        places = tl.cdiv(visible, DIVISOR)
        whole = places
        everything = places <= count
        if candidate_ptr is not None:
            candidate_ptr += row * CANDIDATES
            places = _places(candidate_ptr, CANDIDATES, CANDIDATE_TILE, MEMBERS)
            everything &= places >= visible
    score_ptr += row * score_stride
    begin = 0
    end = places
    if place_ptr is not None:
        place_ptr += row * PARTS * count
        end = PARTS * count
        out_ptr += row * count
    else:
        share = tl.cdiv(places, PARTS)
        begin = tl.program_id(1) * share
        end = tl.minimum(begin + share, places)
        out_ptr += (row * PARTS + tl.program_id(1)) * count
    if everything:
        if LAST:
            for low in range(0, count, BLOCK):
                at = low + lane
                tl.store(out_ptr + at, tl.where(at < whole, at, -1), mask=at < count)
    else:
        threshold, ties = _threshold(score_ptr, place_ptr, begin, end, count, BLOCK)
        above_before = 0
        equal_before = 0
        for low in range(begin, end, BLOCK):
            key, place = _order_keys(score_ptr, place_ptr, low + lane, end)
            above = (key > threshold).to(tl.int32)
            equal = ((key == threshold) & (key > 0)).to(tl.int32)
            both = tl.cumsum(above + (equal << 16), 0)  # BLOCK < 2^15: two counts in one scan
            above_here = above_before + (both & 0xFFFF) - above
            equal_here = equal_before + (both >> 16) - equal
            keep = (above > 0) | ((equal > 0) & (equal_here < ties))
            if LAST and candidate_ptr is not None:
                block = tl.load(candidate_ptr + place // MEMBERS, mask=keep, other=0)
                place = block * MEMBERS + place % MEMBERS
            tl.store(out_ptr + above_here + tl.minimum(equal_here, ties), place, mask=keep)
            above_before += tl.sum(above, 0)
            equal_before += tl.sum(equal, 0)
        kept = above_before + tl.minimum(equal_before, ties)
        for low in range(0, count, BLOCK):
            at = low + lane
            tl.store(out_ptr + at, tl.full((BLOCK,), -1, tl.int32), mask=(at >= kept) & (at < count))


# ---- ops ----------------------------------------------------------------------------------------------------------


def top(scores_TN: Tensor, *, count: int) -> Tensor:
    """See ``Indexer.top``."""
    assert scores_TN.shape[1] < 2 or scores_TN.stride(1) == 1
    return _chosen(scores_TN, count=count)


def select(q_THK: Tensor, weight_TH: Tensor, *, keys: Planes, rows: IndexRows, count: int) -> Tensor:
    """See ``Indexer.select``."""
    chosen = []
    for part in _row_tiles(rows.visible_T.numel(), _entries(keys, rows)):
        some = _part(rows, part)
        scores, _ = _scores(q_THK[part], weight_TH[part], keys=keys, rows=some, members=0)
        chosen.append(_chosen(scores, count=count, visible_T=some.visible_T))
    return _joined(chosen, q_THK, count=count)


def select_with_candidates(
    q_THK: Tensor,
    weight_TH: Tensor,
    *,
    keys: Planes,
    rows: IndexRows,
    count: int,
    blocks: int,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """See ``Indexer.select_with_candidates``."""
    chosen, candidates = [], []
    for part in _row_tiles(rows.visible_T.numel(), _entries(keys, rows)):
        some = _part(rows, part)
        scores, peaks = _scores(q_THK[part], weight_TH[part], keys=keys, rows=some, members=block_size)
        chosen.append(_chosen(scores, count=count, visible_T=some.visible_T))
        candidates.append(_chosen(peaks, count=blocks, visible_T=some.visible_T, divisor=block_size))
    return _joined(chosen, q_THK, count=count), _joined(candidates, q_THK, count=blocks)


def select_within(
    q_THK: Tensor,
    weight_TH: Tensor,
    *,
    keys: Planes,
    rows: IndexRows,
    count: int,
    candidates_TM: Tensor,
    block_size: int,
) -> Tensor:
    """See ``Indexer.select_within``."""
    values, scales = keys
    candidates_TM = candidates_TM.contiguous()
    assert candidates_TM.dtype is torch.int32 and candidates_TM.shape[1] > 0
    places = candidates_TM.shape[1] * block_size
    chosen = []
    for part in _row_tiles(rows.visible_T.numel(), places):
        some, q, weight = _part(rows, part), q_THK[part].contiguous(), weight_TH[part].contiguous()
        scores = torch.empty(q.shape[0], places, dtype=torch.float32, device=q.device)
        tiles = triton.cdiv(places, KEYS_AT_ONCE)
        _score_candidates[(q.shape[0], min(tiles, triton.cdiv(PROGRAMS, q.shape[0])))](
            q,
            weight,
            values,
            scales,
            some.request_T,
            some.visible_T,
            some.block_table_RB,
            candidates_TM[part],
            scores,
            some.block_table_RB.stride(0),
            values.stride(0),
            scales.stride(0),
            places,
            _scale(q),
            **_key_shape(q, keys),
            MEMBERS=block_size,
            CANDIDATES=candidates_TM.shape[1],
            CANDIDATE_TILE=triton.next_power_of_2(candidates_TM.shape[1]),
        )
        chosen.append(
            _chosen(
                scores,
                count=count,
                visible_T=some.visible_T,
                candidates_TM=candidates_TM[part],
                members=block_size,
            )
        )
    return _joined(chosen, q_THK, count=count)


def _scores(
    q_THK: Tensor, weight_TH: Tensor, *, keys: Planes, rows: IndexRows, members: int
) -> tuple[Tensor, Tensor]:
    """fp32 scores [T, N], written where a row sees the entry; with ``members`` the best of each block [T, N / members]."""
    q, weight = q_THK.contiguous(), weight_TH.contiguous()
    count, entries = q.shape[0], _entries(keys, rows)
    assert not members or KEYS_AT_ONCE % members == 0, "a candidate block lies within one key tile"
    scores = torch.empty(count, entries, dtype=torch.float32, device=q.device)
    peaks = scores[:, :0]
    if members:
        peaks = torch.empty(count, triton.cdiv(entries, members), dtype=torch.float32, device=q.device)
    if not entries:
        return scores, peaks
    capacity = min(count, count // RUN + rows.block_table_RB.shape[0] + 1)
    first = torch.empty(capacity + 1, dtype=torch.int32, device=q.device)
    _runs[(1,)](rows.request_T, first, count, capacity, RUN=RUN, BLOCK=SMALL_BLOCK)
    values, scales = keys
    grid = (capacity, min(triton.cdiv(entries, KEYS_AT_ONCE), triton.cdiv(PROGRAMS, capacity)))
    _score_runs[grid](
        q,
        weight,
        values,
        scales,
        rows.request_T,
        rows.visible_T,
        rows.block_table_RB,
        first,
        scores,
        peaks if members else None,
        rows.block_table_RB.stride(0),
        values.stride(0),
        scales.stride(0),
        entries,
        peaks.shape[1],
        _scale(q),
        **_key_shape(q, keys),
        MEMBERS=max(members, 1),
        RUN=RUN,
    )
    return scores, peaks


def _chosen(
    scores_TN: Tensor,
    *,
    count: int,
    visible_T: Tensor | None = None,
    divisor: int = 1,
    candidates_TM: Tensor | None = None,
    members: int = 1,
) -> Tensor:
    """int32 [T, count]: see ``_choose``. How a row is cut into parts cannot be seen in what is chosen."""
    rows, limit = scores_TN.shape
    out = torch.empty(rows, count, dtype=torch.int32, device=scores_TN.device)
    if not rows or not count:
        return out
    width = candidates_TM.shape[1] if candidates_TM is not None else 1
    shape = {
        "DIVISOR": divisor,
        "MEMBERS": members,
        "CANDIDATES": width,
        "CANDIDATE_TILE": triton.next_power_of_2(width),
    }
    parts = max(1, min(triton.cdiv(PARTS, rows), math.isqrt(limit // count)))
    given = (visible_T, candidates_TM)
    numbers = (scores_TN.stride(0), limit, count)
    listed = None
    if parts > 1:
        listed = torch.empty(rows, parts, count, dtype=torch.int32, device=scores_TN.device)
        _choose[(rows, parts)](
            scores_TN,
            None,
            *given,
            listed,
            *numbers,
            **shape,
            PARTS=parts,
            LAST=False,
            BLOCK=_block(limit // parts),
            num_warps=WARPS,
        )
    _choose[(rows, 1)](
        scores_TN,
        listed,
        *given,
        out,
        *numbers,
        **shape,
        PARTS=parts,
        LAST=True,
        BLOCK=_block(parts * count if parts > 1 else limit),
        num_warps=WARPS,
    )
    return out


def _block(scores: int) -> int:
    return BLOCK if scores > SMALL_BLOCK else SMALL_BLOCK


def _entries(keys: Planes, rows: IndexRows) -> int:
    """How many entries a row can see at most: as many as its block table has places for."""
    return rows.block_table_RB.shape[1] * keys[0].shape[1]


def _row_tiles(rows: int, columns: int) -> list[slice]:
    """Rows of one pass: as many as keep the scores within ``SCORE_BYTES``, and whole runs where a request is long."""
    size = max(1, SCORE_BYTES // (4 * max(columns, 1)) // RUN) * RUN
    return [slice(low, min(low + size, rows)) for low in range(0, rows, size)]


def _part(rows: IndexRows, part: slice) -> IndexRows:
    assert rows.block_table_RB.shape[1] < 2 or rows.block_table_RB.stride(1) == 1
    return IndexRows(
        request_T=rows.request_T[part].contiguous(),
        visible_T=rows.visible_T[part].contiguous(),
        block_table_RB=rows.block_table_RB,
    )


def _joined(parts: list[Tensor], q: Tensor, *, count: int) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.empty(0, count, dtype=torch.int32, device=q.device)


def _scale(q_THK: Tensor) -> float:
    heads, channels = q_THK.shape[1:]
    return channels**-0.5 * heads**-0.5


def _key_shape(q_THK: Tensor, keys: Planes) -> dict[str, int]:
    """What both scoring kernels know of queries and records when they are compiled."""
    heads, channels = q_THK.shape[1:]
    values, scales = keys
    slots = values.shape[1]
    assert channels % GROUP == 0 and channels & (channels - 1) == 0, (
        "index channels are a power of two from 32 on"
    )
    assert values.stride()[1:] == (channels // 2, 1) and scales.stride()[1:] == (channels // GROUP, 1)
    return {
        "HEADS": heads,
        "CHANNELS": channels,
        "SLOTS": slots,
        "HEAD_TILE": max(16, triton.next_power_of_2(heads)),
        "KEY_TILE": KEYS_AT_ONCE,
    }


_KEYS = {
    "q_ptr": "*bf16",
    "weight_ptr": "*bf16",
    "data_ptr": "*u8",
    "scale_ptr": "*u8",
    "request_ptr": "*i64",
    "visible_ptr": "*i64",
    "table_ptr": "*i64",
    "score_ptr": "*fp32",
    "table_stride": "i32",
    "data_stride": "i32",
    "scale_stride": "i32",
    "score_stride": "i32",
    "scale": "fp32",
}
_RELEASED = {"HEADS": 32, "CHANNELS": 128, "SLOTS": 128, "HEAD_TILE": 32, "KEY_TILE": KEYS_AT_ONCE}
_TINY = {"HEADS": 4, "CHANNELS": 64, "SLOTS": 8, "HEAD_TILE": 16, "KEY_TILE": KEYS_AT_ONCE}
_ONE_LAUNCH = {"DIVISOR": 1, "MEMBERS": 1, "CANDIDATES": 1, "CANDIDATE_TILE": 1, "PARTS": 1, "LAST": True}
_WITHIN = {**_ONE_LAUNCH, "MEMBERS": 8, "CANDIDATES": 2048, "CANDIDATE_TILE": 2048, "BLOCK": BLOCK}
_CHOICE = {
    "score_ptr": "*fp32",
    "place_ptr": "*i32",
    "visible_ptr": "*i64",
    "candidate_ptr": "*i32",
    "out_ptr": "*i32",
    "score_stride": "i32",
    "limit": "i32",
    "count": "i32",
}
AOT = (
    (
        _runs,
        {"request_ptr": "*i64", "first_ptr": "*i32", "rows": "i32", "capacity": "i32"},
        {"RUN": RUN, "BLOCK": SMALL_BLOCK},
    ),
    *(
        (
            _score_runs,
            {**_KEYS, "first_ptr": "*i32", "peak_ptr": "*fp32", "peak_stride": "i32"},
            {**shape, **peaks, "RUN": RUN},
        )
        for shape in (_RELEASED, _TINY)
        for peaks in ({"MEMBERS": 8}, {"MEMBERS": 1, "peak_ptr": None})
    ),
    *(
        (
            _score_candidates,
            {**_KEYS, "candidate_ptr": "*i32"},
            {**shape, "MEMBERS": 8, "CANDIDATES": candidates, "CANDIDATE_TILE": candidates},
        )
        for shape, candidates in ((_RELEASED, 2048), (_TINY, 64))
    ),
    (_choose, _CHOICE, {**_ONE_LAUNCH, "place_ptr": None, "candidate_ptr": None, "BLOCK": SMALL_BLOCK}),
    (
        _choose,
        _CHOICE,
        {**_ONE_LAUNCH, "place_ptr": None, "candidate_ptr": None, "visible_ptr": None, "BLOCK": BLOCK},
    ),
    (
        _choose,
        _CHOICE,
        {
            **_ONE_LAUNCH,
            "place_ptr": None,
            "candidate_ptr": None,
            "DIVISOR": 8,
            "PARTS": 16,
            "LAST": False,
            "BLOCK": BLOCK,
        },
    ),
    (_choose, _CHOICE, {**_ONE_LAUNCH, "candidate_ptr": None, "PARTS": 16, "BLOCK": BLOCK}),
    (_choose, _CHOICE, {**_WITHIN, "place_ptr": None}),
    (_choose, _CHOICE, {**_WITHIN, "PARTS": 5}),
)
