"""Scores, candidate blocks and exact top-k in plain torch, under a bounded workspace.

Memory: nothing here grows with rows x entries. Keys are decoded ``KEY_TILE`` at a time, scored for ``row tiles`` of bounded size,
and merged into each row's running best; what stays is the result's own size.

Exactness: the values of an MXFP4 group of 32 are multiples of half its scale, at most 12 of them. Where the scales of a vector's
groups lie within ``s`` octaves (``_spread``), its values are integers below 2^(s + 4) times one unit, the dot product of two such
vectors is an integer below K * 2^(s + s' + 8), and so is every partial sum: below 2^24 fp32 holds each of them exactly, in any
order. Elsewhere float64 does. Both give the same number, so the choice (per tile, for speed) cannot be seen. The sum over heads
is in float64, rounded once to fp32: the same score for any tiling, batch or thread count.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashstep.kernels.indexer import IndexRows, Planes
from flashstep.quant import mxfp4

NEG = float("-inf")
POS = float("inf")
KEY_TILE = 16_384  # entries decoded at a time: 8 MiB of float64 at 64 channels
COLUMNS = 512  # entries scored by one product
FP32_BITS = 24
UNIT_BITS = 4  # a value is below 2^4 units of its own group (spread 0)
DOT_BYTES = 1 << 20  # float64 dot products alive at a time: what stays in a core's cache
GATHER_BYTES = 8 << 20  # decoded keys of row-wise gathers alive at a time
FEW_ROWS = 4  # a request with so few rows in a step (decode) is scored beside others, each row gathering its own keys


def top(scores_TN: Tensor, *, count: int) -> Tensor:
    """See ``Indexer.top``."""
    scores = torch.where(
        scores_TN > NEG, scores_TN, NEG
    )  # NaN compares false: it becomes -inf, which is never selected
    places = _ascending(scores, count=count)
    return torch.where(places < scores.shape[1], places, -1).int()


def select(q_THK: Tensor, weight_TH: Tensor, *, keys: Planes, rows: IndexRows, count: int) -> Tensor:
    """See ``Indexer.select``."""
    best = _Best(q_THK, count=count)
    for part, first, scores in _score_tiles(q_THK, weight_TH, keys=keys, rows=rows, least=count, align=1):
        best.merge(scores, part=part, first=first)
    return best.places(_everything(rows.visible_T, count=count), visible_T=rows.visible_T)


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
    best, best_blocks = _Best(q_THK, count=count), _Best(q_THK, count=blocks)
    blocks_T = -(-rows.visible_T // block_size)
    tiles = _score_tiles(
        q_THK, weight_TH, keys=keys, rows=rows, least=min(count, blocks * block_size), align=block_size
    )
    for part, first, scores in tiles:
        best.merge(scores, part=part, first=first)
        if int(blocks_T[part].max()) > blocks:
            peaks = _block_scores(scores, first=first, visible=rows.visible_T[part], size=block_size)
            best_blocks.merge(peaks, part=part, first=first // block_size)
    return (
        best.places(_everything(rows.visible_T, count=count), visible_T=rows.visible_T),
        best_blocks.places(_everything(blocks_T, count=blocks), visible_T=blocks_T),
    )


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
    entries = torch.empty(q_THK.shape[0], count, dtype=torch.int32, device=q_THK.device)
    covered = (candidates_TM >= 0).sum(1) * block_size >= rows.visible_T  # every visible entry is a candidate
    inside = covered.nonzero().squeeze(1)
    if inside.numel():
        some = IndexRows(
            request_T=rows.request_T[inside],
            visible_T=rows.visible_T[inside],
            block_table_RB=rows.block_table_RB,
        )
        entries[inside] = select(q_THK[inside], weight_TH[inside], keys=keys, rows=some, count=count)
    for part in _gather_tiles(
        (~covered).nonzero().squeeze(1), slots=candidates_TM.shape[1] * block_size, q=q_THK
    ):
        candidates = candidates_TM[part].long().unsqueeze(2)
        members = (candidates * block_size + torch.arange(block_size, device=q_THK.device)).flatten(1)
        live = (candidates >= 0).expand(-1, -1, block_size).flatten(1) & (
            members < rows.visible_T[part].unsqueeze(1)
        )
        scores = _gathered_scores(
            q_THK[part], weight_TH[part], keys=keys, tables=_tables(rows, part), members=members, live=live
        )
        places = top(scores, count=count).long()
        chosen = members.gather(
            1, places.clamp(min=0)
        )  # candidates ascend, so members ascend: ties stay lowest first
        entries[part] = torch.where(places >= 0, chosen, -1).int()
    return entries


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """Rows ``start .. stop - 1`` of one request: how many entries each sees, the most of them, and the block table."""

    start: int
    stop: int
    visible: Tensor
    most: int
    table: Tensor


def _spans(rows: IndexRows) -> Iterator[_Span]:
    requests, counts = torch.unique_consecutive(rows.request_T, return_counts=True)
    most = rows.visible_T[counts.cumsum(0) - 1].tolist()
    stop = 0
    for request, length, last in zip(requests.tolist(), counts.tolist(), most, strict=True):
        start, stop = stop, stop + length
        visible = rows.visible_T[start:stop]
        yield _Span(start=start, stop=stop, visible=visible, most=last, table=rows.block_table_RB[request])


def _tables(rows: IndexRows, part: Tensor) -> Tensor:
    return rows.block_table_RB[rows.request_T[part]]


def _everything(visible_T: Tensor, *, count: int) -> Tensor:
    """int32 [rows, count]: 0 .. visible - 1, then -1: what is selected where no more is visible, whatever the scores."""
    places = torch.arange(count, device=visible_T.device)
    return torch.where(places < visible_T.unsqueeze(1), places, -1).int()


def _score_tiles(
    q: Tensor, weight: Tensor, *, keys: Planes, rows: IndexRows, least: int, align: int
) -> Iterator[tuple[Tensor | slice, int, Tensor]]:
    """Yield (rows, first entry, fp32 scores [row tile, key tile]): -inf beyond what a row sees, no NaN.

    Key tiles of a row come in ascending order and start at multiples of ``align``. Rows that see at most ``least`` may be left
    out, and so may tiles of which a row sees nothing.
    """
    few = []
    most_gathered = GATHER_BYTES // (q.shape[2] * 8)
    for span in _spans(rows):
        if span.most <= least:
            continue
        if span.stop - span.start <= FEW_ROWS and span.most <= most_gathered:
            few += range(span.start, span.stop)
        else:
            yield from _span_tiles(q, weight, keys=keys, span=span, align=align)
    if few:
        lone = torch.tensor(few, device=q.device)
        most = int(rows.visible_T[lone].max())
        for part in _gather_tiles(lone, slots=most, q=q):
            members = torch.arange(most, device=q.device).expand(part.numel(), most)
            live = members < rows.visible_T[part].unsqueeze(1)
            scores = _gathered_scores(
                q[part], weight[part], keys=keys, tables=_tables(rows, part), members=members, live=live
            )
            yield part, 0, scores


def _span_tiles(
    q: Tensor, weight: Tensor, *, keys: Planes, span: _Span, align: int
) -> Iterator[tuple[slice, int, Tensor]]:
    """The tiles of one request with many rows: keys are decoded once for all of them."""
    heads, channels = q.shape[1:]
    q, weight = q[span.start : span.stop], _scaled(weight[span.start : span.stop], q)
    q_spread = _spread(q.float())
    key_tile = KEY_TILE // align * align
    for first in range(0, span.most, key_tile):
        stop = min(first + key_tile, span.most)
        decoded = _decode(
            keys, span.table.unsqueeze(0), torch.arange(first, stop, device=q.device).unsqueeze(0)
        )[0]
        key_spread = _spread(decoded).amax()
        columns = min(COLUMNS, stop - first)
        row_tile = max(1, DOT_BYTES // (heads * columns * 8))
        seeing = int((span.visible <= first).sum())  # rows ascend in what they see
        for low in range(seeing, q.shape[0], row_tile):
            part = slice(low, low + row_tile)
            dtype = _exact_dtype(q_spread[part], key_spread, channels=channels)
            scores = _score(q[part].to(dtype), weight[part], decoded.T.to(dtype), columns=columns)
            if int(span.visible[low]) < stop:
                places = torch.arange(first, stop, device=q.device)
                scores.masked_fill_(places >= span.visible[part].unsqueeze(1), NEG)
            where = slice(span.start + low, span.start + low + scores.shape[0])
            yield where, first, scores.nan_to_num_(nan=NEG, posinf=POS, neginf=NEG)


def _score(q: Tensor, weight: Tensor, decoded: Tensor, *, columns: int) -> Tensor:
    """fp32 [rows, keys] scores, ``columns`` keys at a time; dot products in the dtype of ``q``, the sum over heads in float64."""
    rows, heads, _ = q.shape
    scores = torch.empty(rows, decoded.shape[1], dtype=torch.float32, device=q.device)
    q = q.flatten(0, 1)
    for low in range(0, decoded.shape[1], columns):
        dots = torch.mm(q, decoded[:, low : low + columns]).relu_().double()
        scores[:, low : low + columns] = torch.bmm(weight, dots.view(rows, heads, -1)).squeeze(1)
    return scores


def _gather_tiles(rows: Tensor, *, slots: int, q: Tensor) -> Iterator[Tensor]:
    """Row numbers, so many at a time that ``slots`` decoded keys a row stay within ``GATHER_BYTES``."""
    return iter(rows.split(max(1, GATHER_BYTES // (slots * q.shape[2] * 8))) if rows.numel() else ())


def _gathered_scores(
    q: Tensor, weight: Tensor, *, keys: Planes, tables: Tensor, members: Tensor, live: Tensor
) -> Tensor:
    """fp32 [rows, members] scores of each row's own entries ``members`` through its own table; -inf where not ``live``."""
    decoded = _decode(keys, tables, members.where(live, 0))
    dtype = _exact_dtype(_spread(q.float()), _spread(decoded), channels=q.shape[2])
    dots = torch.matmul(q.to(dtype), decoded.to(dtype).transpose(1, 2)).relu_().double()
    scores = torch.matmul(_scaled(weight, q), dots).squeeze(1).float()
    return scores.masked_fill_(~live, NEG).nan_to_num_(nan=NEG, posinf=POS, neginf=NEG)


def _scaled(weight: Tensor, q: Tensor) -> Tensor:
    """float64 [rows, 1, H] head weights with the scale (K * H)^-0.5."""
    heads, channels = q.shape[1:]
    return weight.double().mul_(channels**-0.5 * heads**-0.5).unsqueeze(1)


def _exact_dtype(q_spread: Tensor, key_spread: Tensor, *, channels: int) -> torch.dtype:
    """The narrowest dtype in which every dot product of such vectors is exact (see the module's docstring)."""
    bits = 2 * UNIT_BITS + math.ceil(math.log2(channels)) + int(q_spread.max()) + int(key_spread.max())
    return torch.float32 if bits <= FP32_BITS else torch.float64


def _spread(vectors: Tensor) -> Tensor:
    """int32 [...]: octaves between the largest and the smallest group of 32 channels of each vector [..., K]; zeros count not."""
    peaks = vectors.unflatten(-1, (-1, mxfp4.GROUP)).abs().amax(-1)
    exponent = torch.frexp(peaks).exponent
    lowest = exponent.where(peaks > 0, 128).amin(-1)
    spread = exponent.where(peaks > 0, -128).amax(-1) - lowest
    # far below 1 a product could leave the range of fp32: call that spread too
    return spread.where(lowest > -60, 128)


def _block_scores(scores: Tensor, *, first: int, visible: Tensor, size: int) -> Tensor:
    """fp32 [rows, blocks]: the best member of each block; the block of a row's newest visible entry is forced in."""
    short = -scores.shape[1] % size
    if short:
        scores = torch.nn.functional.pad(scores, (0, short), value=NEG)
    best = scores.unflatten(1, (-1, size)).amax(2)
    newest = (visible - 1 - first).div(size, rounding_mode="floor")
    here = ((newest >= 0) & (newest < best.shape[1])).nonzero().squeeze(1)
    best[here, newest[here]] = POS
    return best


class _Best:
    """The running best ``count`` places of each row, merged tile by tile in ascending order of places."""

    def __init__(self, q: Tensor, *, count: int) -> None:
        self._count = count
        self._scores = torch.full((q.shape[0], count), NEG, dtype=torch.float32, device=q.device)
        self._places = torch.full((q.shape[0], count), -1, dtype=torch.int64, device=q.device)

    def merge(self, scores: Tensor, *, part: Tensor | slice, first: int) -> None:
        """Scores (no NaN) of places ``first ..`` for rows ``part``. Kept places come first, so that lower ones win ties."""
        tile = _ascending(scores, count=self._count)
        found, tile = tile < scores.shape[1], tile.clamp(max=scores.shape[1] - 1)
        places = torch.cat((self._places[part], (tile + first).where(found, -1)), dim=1)
        joined = torch.cat((self._scores[part], scores.gather(1, tile).where(found, NEG)), dim=1)
        chosen = _ascending(joined, count=self._count)
        found, chosen = chosen < joined.shape[1], chosen.clamp(max=joined.shape[1] - 1)
        self._places[part] = places.gather(1, chosen).where(found, -1)
        self._scores[part] = joined.gather(1, chosen).where(found, NEG)

    def places(self, everything: Tensor, *, visible_T: Tensor) -> Tensor:
        """int32 [rows, count], ascending, -1 filled; ``everything`` for rows that see no more than ``count``."""
        return torch.where(visible_T.unsqueeze(1) <= self._count, everything, self._places.int())


def _ascending(scores: Tensor, *, count: int) -> Tensor:
    """int64 [rows, count]: places of the best scores (no NaN), ascending; N, the number of places, where only -inf is left."""
    rows, entries = scores.shape
    if entries <= count:
        places = (
            torch.arange(entries, device=scores.device).expand(rows, entries).where(scores > NEG, entries)
        )
        places = torch.nn.functional.pad(places, (0, count - entries), value=entries)
        return places.sort(dim=1).values
    values, places = scores.topk(count + 1, dim=1)
    last, next_one = values[:, count - 1], values[:, count]
    places = places[:, :count].where(values[:, :count] > NEG, entries)
    unclear = (
        ((last == next_one) & (last > NEG)).nonzero().squeeze(1)
    )  # topk's choice among these equals is arbitrary
    if unclear.numel():
        tied, edge = scores[unclear], last[unclear].unsqueeze(1)
        above, equal = tied > edge, tied == edge
        missing = count - above.sum(1, keepdim=True)
        kept = above | (equal & (equal.cumsum(1) <= missing))
        places[unclear] = kept.nonzero()[:, 1].view(-1, count)
    return places.sort(dim=1).values


def _decode(keys: Planes, tables: Tensor, entries: Tensor) -> Tensor:
    """fp32 [rows, n, K] index keys of ``entries`` (int64 [rows, n]) through each row's block table [rows, B]; exact."""
    values, scales = keys
    slots = values.shape[1]
    block, place = tables.gather(1, entries // slots), entries % slots
    return mxfp4.dequantise(values[block, place], scales[block, place])
