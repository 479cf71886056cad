"""Sampling in Triton: a row is cut into pieces of a fixed length, each piece names its best token, the last launch the row's.

Noise is made where it is used, four numbers a Philox counter, in fp64 as the reference does; a row at temperature 0 draws none.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from flashstep.kernels.sampling.philox import LANES, Purpose

PIECE = 4096  # tokens a program looks at, of many rows
SHORT_PIECE = 1024  # of so few that longer ones would leave multiprocessors idle
FEW_ROWS = 24
LINK_PIECES = 128  # programs that share the vocabulary at a place of a chain: about one a multiprocessor
LINK_TOKENS = 64  # that a program multiplies at a time
MOST_TOGETHER = 64  # requests that a program multiplies with
QUADS = 256  # groups of four tokens in registers at a time
NEVER = -torch.inf
NOBODY = 2**31 - 1  # an id above all ids


@triton.jit
def peaks_of_pieces(
    logits_ptr, temperature_ptr, peaks_ptr, row_stride, vocabulary, PIECE: tl.constexpr
) -> None:
    """Program (row, piece): the largest logit of the piece, of a row that is drawn from."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(temperature_ptr + row) > 0:
        at = piece * PIECE + tl.arange(0, PIECE)
        x = tl.load(logits_ptr + row * row_stride + at, mask=at < vocabulary, other=float("-inf"))
        tl.store(peaks_ptr + row * tl.num_programs(1) + piece, tl.max(x))


@triton.jit
def _uniform(word):
    return (word.to(tl.float64) + 0.5) * (2.0**-32)


@triton.jit
def _draw(
    logits_ptr, peaks_ptr, temperature_ptr, seed_ptr, position_ptr, least_ptr, values_ptr, ids_ptr,
    row_stride, vocabulary,
    CUTS: tl.constexpr, PURPOSE: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """Program (row, piece): the best value of the piece and its first token; values are fp64 of what ``sample`` compares."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pieces = tl.num_programs(1)
    every = tl.arange(0, PIECES)
    peaks = tl.load(peaks_ptr + row * pieces + every, mask=every < pieces, other=float("-inf"))
    peak = tl.max(peaks)
    peak = tl.where(peak > float("-inf"), peak, 0.0).to(tl.float64)
    temperature = tl.load(temperature_ptr + row)
    warm = temperature > 0
    divisor = tl.where(warm, temperature, 1.0)
    seed = tl.load(seed_ptr + row)
    key0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    position = (tl.load(position_ptr + row) & 0xFFFFFFFF).to(tl.uint32)
    least = tl.load(least_ptr + row) if CUTS else 0
    quad = tl.arange(0, QUADS)
    best = tl.full((QUADS,), float("-inf"), tl.float64)
    best_id = tl.full((QUADS,), 2147483647, tl.int32)
    for start in range(0, PIECE // 4, QUADS):
        group = piece * (PIECE // 4) + start + quad
        noise0 = tl.zeros((QUADS,), tl.float64)
        noise1 = noise0
        noise2 = noise0
        noise3 = noise0
        if warm:
            zero = tl.zeros((QUADS,), tl.uint32)
            w0, w1, w2, w3 = tl.philox_impl(
                group.to(tl.uint32), zero + position, zero + PURPOSE, zero, zero + key0, zero + key1
            )
            noise0 = -libdevice.log(-libdevice.log(_uniform(w0)))
            noise1 = -libdevice.log(-libdevice.log(_uniform(w1)))
            noise2 = -libdevice.log(-libdevice.log(_uniform(w2)))
            noise3 = -libdevice.log(-libdevice.log(_uniform(w3)))
        for lane in tl.static_range(4):
            token = group * 4 + lane
            inside = token < vocabulary
            x = tl.load(logits_ptr + row * row_stride + token, mask=inside, other=float("-inf"))
            noise = noise0 if lane == 0 else (noise1 if lane == 1 else (noise2 if lane == 2 else noise3))
            value = x.to(tl.float64)
            if warm:
                value = (value - peak) / divisor + noise
            if CUTS:
                bits = (x + 0.0).to(tl.int32, bitcast=True)
                ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
                inside = inside & ((ordered * 4294967296 - token >= least) | (warm == 0))
            better = inside & ((value > best) | ((value == best) & (token < best_id)))
            best = tl.where(better, value, best)
            best_id = tl.where(better, token, best_id)
    top = tl.max(best)
    tl.store(values_ptr + row * pieces + piece, top)
    tl.store(ids_ptr + row * pieces + piece, tl.min(tl.where(best == top, best_id, 2147483647)))


@triton.jit
def _link(
    logits_ptr, weight_ptr, embedding_ptr, anchor_ptr, values_ptr, ids_ptr, drafts_ptr,
    request_stride, place_stride, requests, vocabulary, places, place, tiles,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Program (piece, block of requests): the best sum of the piece's tokens for each request, at one place of its chain.

    The token before is the best of the last place's pieces, which every program finds for itself. The number of pieces is fixed.
    """
    piece = tl.program_id(0)
    request = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    held = request < requests
    if place == 0:
        before = tl.load(anchor_ptr + request, mask=held, other=0)
    else:
        every = tl.arange(0, PIECES)
        last = ((place - 1) * requests + request)[:, None] * PIECES + every[None, :]
        value = tl.load(values_ptr + last, mask=held[:, None], other=float("-inf"))
        id_before = tl.load(ids_ptr + last, mask=held[:, None], other=2147483647)
        largest = tl.max(value, 1)
        found = tl.min(tl.where(value == largest[:, None], id_before, 2147483647), 1)
        before = tl.minimum(found, vocabulary - 1).to(tl.int64)
        tl.store(drafts_ptr + request * places + place - 1, before, mask=held & (piece == 0))
    rank = tl.arange(0, RANK)
    embedding = tl.load(embedding_ptr + before[None, :] * RANK + rank[:, None], mask=held[None, :], other=0.0)
    best = tl.full((BLOCK_V, BLOCK_R), float("-inf"), tl.float32)
    best_id = tl.full((BLOCK_V, BLOCK_R), 2147483647, tl.int32)
    logits_ptr += place * place_stride
    for tile in range(tiles):
        token = (piece * tiles + tile) * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = token < vocabulary
        weight = tl.load(
            weight_ptr + token.to(tl.int64)[:, None] * RANK + rank[None, :], mask=inside[:, None], other=0.0
        )
        x = tl.load(
            logits_ptr + request.to(tl.int64)[None, :] * request_stride + token[:, None],
            mask=inside[:, None] & held[None, :],
            other=float("-inf"),
        )
        x += tl.dot(weight, embedding)
        better = x > best  # tokens ascend
        best = tl.where(better, x, best)
        best_id = tl.where(better, token[:, None], best_id)
    top = tl.max(best, 0)
    first = tl.min(tl.where(best == top[None, :], best_id, 2147483647), 0)
    at = (place * requests + request) * PIECES + piece
    tl.store(values_ptr + at, top, mask=held)
    tl.store(ids_ptr + at, first, mask=held)


@triton.jit
def _choose(values_ptr, ids_ptr, out_ptr, out_stride, pieces, vocabulary, PIECES: tl.constexpr):
    """Program (row,): the first token of the best piece."""
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, PIECES)
    held = every < pieces
    value = tl.load(values_ptr + row * pieces + every, mask=held, other=float("-inf"))
    token = tl.load(ids_ptr + row * pieces + every, mask=held, other=2147483647)
    top = tl.max(value)
    found = tl.min(tl.where(value == top, token, 2147483647))
    tl.store(
        out_ptr + row * out_stride, tl.minimum(found, vocabulary - 1).to(tl.int64)
    )  # NaN everywhere: some token


def sample(
    logits_TV: Tensor,
    *,
    temperature_T: Tensor,
    seed_T: Tensor,
    position_T: Tensor,
    least_T: Tensor | None = None,
) -> Tensor:
    """See ``Sampling.sample``."""
    rows, vocabulary = logits_TV.shape
    assert logits_TV.stride(1) == 1
    piece = piece_of(rows)
    pieces = triton.cdiv(vocabulary, piece)
    peaks = torch.empty(rows, pieces, dtype=torch.float32, device=logits_TV.device)
    temperature_T = temperature_T.contiguous()
    peaks_of_pieces[(rows, pieces)](
        logits_TV, temperature_T, peaks, logits_TV.stride(0), vocabulary, PIECE=piece
    )
    values, ids = _bests(rows, pieces, logits_TV.device)
    _draw[(rows, pieces)](
        logits_TV,
        peaks,
        temperature_T,
        seed_T.contiguous(),
        position_T.contiguous(),
        least_T,
        values,
        ids,
        logits_TV.stride(0),
        vocabulary,
        CUTS=least_T is not None,
        PURPOSE=int(Purpose.TOKEN),
        PIECES=triton.next_power_of_2(pieces),
        PIECE=piece,
        QUADS=QUADS,
    )
    return _chosen(values, ids, vocabulary)


def chain(
    logits_RKV: Tensor, *, anchor_R: Tensor, embedding_VM: Tensor, weight: Tensor, places: int
) -> Tensor:
    """See ``Sampling.chain``: a launch a place, and one that chooses the last."""
    requests, _, vocabulary = logits_RKV.shape
    # the reference prepares float64, and gemm.cuda rows that lie whole steps apart, which the released rank fills
    weight = weight.to(torch.bfloat16).contiguous()
    rank = weight.shape[1]
    assert logits_RKV.stride(2) == 1 and embedding_VM.is_contiguous()
    device = logits_RKV.device
    values = torch.empty(places, requests, LINK_PIECES, dtype=torch.float32, device=device)
    ids = torch.empty(places, requests, LINK_PIECES, dtype=torch.int32, device=device)
    drafts_RK = torch.empty(requests, places, dtype=torch.int64, device=device)
    block = max(16, min(triton.next_power_of_2(requests), MOST_TOGETHER))
    for place in range(places):
        _link[(LINK_PIECES, triton.cdiv(requests, block))](
            logits_RKV,
            weight,
            embedding_VM,
            anchor_R,
            values,
            ids,
            drafts_RK,
            logits_RKV.stride(0),
            logits_RKV.stride(1),
            requests,
            vocabulary,
            places,
            place,
            triton.cdiv(vocabulary, LINK_PIECES * LINK_TOKENS),
            RANK=rank,
            BLOCK_R=block,
            BLOCK_V=LINK_TOKENS,
            PIECES=LINK_PIECES,
        )
    _choose[(requests,)](
        values[-1], ids[-1], drafts_RK[:, -1:], places, LINK_PIECES, vocabulary, PIECES=LINK_PIECES
    )
    return drafts_RK


def piece_of(rows: int) -> int:
    """A maximum of maxima is the same however it is cut."""
    return SHORT_PIECE if rows <= FEW_ROWS else PIECE


def _bests(rows: int, pieces: int, device: torch.device) -> tuple[Tensor, Tensor]:
    values = torch.empty(rows, pieces, dtype=torch.float64, device=device)
    return values, torch.empty(rows, pieces, dtype=torch.int32, device=device)


def _chosen(values: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    rows, pieces = values.shape
    out_T = torch.empty(rows, dtype=torch.int64, device=values.device)
    _choose[(rows,)](values, ids, out_T, 1, pieces, vocabulary, PIECES=triton.next_power_of_2(pieces))
    return out_T


assert LANES == 4
_ROW = {"row_stride": "i32", "vocabulary": "i32"}
_COUNTS = {"out_stride": "i32", "pieces": "i32", "vocabulary": "i32"}
_BESTS = {"values_ptr": "*fp64", "ids_ptr": "*i32"}
AOT = (
    (
        peaks_of_pieces,
        {"logits_ptr": "*fp32:16", "temperature_ptr": "*fp64", "peaks_ptr": "*fp32", **_ROW},
        {"PIECE": PIECE},
    ),
    *(
        (
            _draw,
            {
                "logits_ptr": "*fp32:16",
                "peaks_ptr": "*fp32",
                "temperature_ptr": "*fp64",
                "seed_ptr": "*i64",
                "position_ptr": "*i64",
                "least_ptr": "*i64",
                **_BESTS,
                **_ROW,
            },
            {"CUTS": cuts, "PURPOSE": 0, "PIECES": 32, "PIECE": PIECE, "QUADS": QUADS},
        )
        for cuts in (False, True)
    ),
    *(
        (
            _link,
            {
                "logits_ptr": "*fp32:16",
                "weight_ptr": "*bf16:16",
                "embedding_ptr": "*bf16:16",
                "anchor_ptr": "*i64",
                "values_ptr": "*fp32",
                "ids_ptr": "*i32",
                "drafts_ptr": "*i64",
                **dict.fromkeys(
                    ("request_stride", "place_stride", "requests", "vocabulary", "places", "place", "tiles"),
                    "i32",
                ),
            },
            {"RANK": 256, "BLOCK_R": block, "BLOCK_V": LINK_TOKENS, "PIECES": LINK_PIECES, **place},
        )
        for block in (16, 64)
        for place in ({}, {"place": 1, "requests": 1}, {"place": 0})
    ),
    *(
        (_choose, {**_BESTS, "values_ptr": kind, "out_ptr": "*i64", **_COUNTS}, {"PIECES": 128})
        for kind in ("*fp32", "*fp64")
    ),
)
