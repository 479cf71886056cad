"""Scores, candidate blocks and exact top-k in CUDA C++ for Hopper (score.cu, choose.cu), at the released index shapes.

A selection is: queries prepared and the work planned, scores (and the best of each candidate block) as fp32, the choice, for long
rows in two steps. Shapes of launches and scratch come from rows and from the block table's width; the work follows what the rows
see, and blocks share it evenly. The score of (row, entry) is one fixed sequence of operations whatever stands beside it. Other
shapes are the Triton row's.
"""

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashstep.kernels.device import multiprocessors
from flashstep.kernels.indexer import IndexRows, Planes, triton
from flashstep.kernels.jit import c_argument, cuda_library, launched, programmatic

SCORE, CHOOSE = (Path(__file__).with_name(name) for name in ("score.cu", "choose.cu"))
HEADS, CHANNELS, MEMBERS = 32, 128, 8
SCORE_BYTES = 512 << 20  # fp32 scores alive at a time
RUN = 8  # rows that share a decoded key, at most
MOST_ROWS = (
    512  # rows of one pass; so many come from prompts, and are chosen for through the best of their blocks
)
THREADS = 512  # of a block of score.cu
FEW_ROWS, LONG, PARTS = 16, 65_536, 22  # so few rows of so many scores are cut into so many parts
MOST_PLACES = 262_144  # scores of one part
LISTED = 8192  # scores that a block of choose.cu lists
SPLITS, PROGRAMS = 22, 384  # of a row's candidates, and of all rows'


def top(scores_TN: Tensor, *, count: int) -> Tensor:
    """See ``Indexer.top``."""
    assert scores_TN.shape[1] < 2 or scores_TN.stride(1) == 1
    return _chosen(scores_TN, count=count)


def select(q_THK: Tensor, weight_TH: Tensor, *, keys: Planes, rows: IndexRows, count: int) -> Tensor:
    """See ``Indexer.select``."""
    if not _released(q_THK, keys, MEMBERS):
        return triton.select(q_THK, weight_TH, keys=keys, rows=rows, count=count)
    chosen = torch.empty(q_THK.shape[0], count, dtype=torch.int32, device=q_THK.device)
    run, prompt = _run(rows), q_THK.shape[0] >= MOST_ROWS
    for part in _parts(q_THK.shape[0], _entries(keys, rows), run=run):
        some = _part(rows, part)
        scores, peaks = _scores(
            q_THK[part], weight_TH[part], keys=keys, rows=some, run=run, peaks=prompt, least=count
        )
        _chosen(scores, peaks_TN=peaks, count=count, visible_T=some.visible_T, out=chosen[part])
    return chosen


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
    if not _released(q_THK, keys, block_size):
        return triton.select_with_candidates(
            q_THK, weight_TH, keys=keys, rows=rows, count=count, blocks=blocks, block_size=block_size
        )
    total, device = q_THK.shape[0], q_THK.device
    chosen = torch.empty(total, count, dtype=torch.int32, device=device)
    candidates = torch.empty(total, blocks, dtype=torch.int32, device=device)
    least = min(count, blocks * block_size)
    run = _run(rows)
    for part in _parts(total, _entries(keys, rows), run=run):
        some = _part(rows, part)
        scores, peaks = _scores(
            q_THK[part], weight_TH[part], keys=keys, rows=some, run=run, peaks=True, least=least
        )
        through = peaks if some.visible_T.numel() > FEW_ROWS else None
        _chosen(scores, peaks_TN=through, count=count, visible_T=some.visible_T, out=chosen[part])
        assert peaks is not None
        _chosen(peaks, count=blocks, visible_T=some.visible_T, divisor=block_size, out=candidates[part])
    return chosen, candidates


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
    if not _released(q_THK, keys, block_size):
        return triton.select_within(
            q_THK,
            weight_TH,
            keys=keys,
            rows=rows,
            count=count,
            candidates_TM=candidates_TM,
            block_size=block_size,
        )
    candidates_TM = candidates_TM.contiguous()
    assert candidates_TM.dtype is torch.int32 and candidates_TM.shape[1] > 0
    places = candidates_TM.shape[1] * block_size
    chosen = torch.empty(q_THK.shape[0], count, dtype=torch.int32, device=q_THK.device)
    for part in _parts(q_THK.shape[0], places, run=1):
        some, candidates = _part(rows, part), candidates_TM[part]
        q, weight = q_THK[part].contiguous(), weight_TH[part].contiguous()
        scores = torch.empty(q.shape[0], places, dtype=torch.float32, device=q.device)
        splits = max(1, min(SPLITS, PROGRAMS // q.shape[0]))
        _launch(
            cuda_library(SCORE).flashstep_score_candidates,
            *_inputs(q, weight, keys, some),
            candidates,
            scores,
            *_strides(keys, some, scores),
            _shift(keys),
            q.shape[0],
            candidates.shape[1],
            _scale(),
            splits,
            THREADS,
            device=q.device,
        )
        _chosen(
            scores,
            count=count,
            visible_T=some.visible_T,
            candidates_TM=candidates,
            members=block_size,
            out=chosen[part],
        )
    return chosen


def _scores(
    q_THK: Tensor,
    weight_TH: Tensor,
    *,
    keys: Planes,
    rows: IndexRows,
    run: int,
    peaks: bool,
    least: int,
) -> tuple[Tensor, Tensor | None]:
    """fp32 scores [T, N], written where a row sees the entry; with ``peaks`` also the best of each block [T, N / 8].

    ``run`` neighbours of one request share decoded keys; where none of them sees more than ``least`` entries they are left out.
    """
    q, weight = q_THK.contiguous(), weight_TH.contiguous()
    count, entries, device = q.shape[0], _entries(keys, rows), q.device
    scores = torch.empty(count, entries, dtype=torch.float32, device=device)
    best = None
    if peaks:
        best = torch.empty(count, -(-entries // MEMBERS), dtype=torch.float32, device=device)
    if count and entries:
        library = cuda_library(SCORE)
        size = library.flashstep_prepared_bytes(ctypes.c_int(count))
        prepared = torch.empty(size, dtype=torch.uint8, device=device)
        _launch(
            library.flashstep_score_runs,
            *_inputs(q, weight, keys, rows),
            prepared,
            scores,
            best,
            *_strides(keys, rows, scores),
            ctypes.c_int64(best.stride(0) if best is not None else 0),
            _shift(keys),
            count,
            run,
            least,
            _scale(),
            multiprocessors(device),
            device=device,
        )
    return scores, best


def _chosen(
    scores_TN: Tensor,
    *,
    count: int,
    peaks_TN: Tensor | None = None,
    visible_T: Tensor | None = None,
    divisor: int = 1,
    candidates_TM: Tensor | None = None,
    members: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """int32 [T, count]: the best places of each row, see choose.cu. How a row is cut cannot be seen in what is chosen."""
    rows, limit = scores_TN.shape
    if out is None:
        out = torch.empty(rows, count, dtype=torch.int32, device=scores_TN.device)
    if rows and count:
        if (count + 1) * MEMBERS > LISTED:
            peaks_TN = None
        parts = 1 if peaks_TN is not None else _part_count(rows, limit)
        listed = listed_scores = None
        if parts > 1:
            listed = torch.empty(rows, parts, count, dtype=torch.int32, device=out.device)
            listed_scores = torch.empty(rows, parts, count, dtype=torch.float32, device=out.device)
        _launch(
            cuda_library(CHOOSE).flashstep_choose,
            scores_TN,
            peaks_TN,
            visible_T,
            candidates_TM,
            out,
            listed,
            listed_scores,
            ctypes.c_int64(scores_TN.stride(0)),
            ctypes.c_int64(peaks_TN.stride(0) if peaks_TN is not None else 0),
            rows,
            limit,
            divisor,
            count,
            candidates_TM.shape[1] if candidates_TM is not None else 0,
            members,
            parts,
            device=out.device,
        )
    return out


def _part_count(rows: int, places: int) -> int:
    """Into how many parts a row is cut, as measured on an H200 on 2026-12-01."""
    most = -(-places // MOST_PLACES)
    return max(1, most, PARTS if rows <= FEW_ROWS and places >= LONG else 1)


def _run(rows: IndexRows) -> int:
    """How many neighbours share decoded keys: a request's drafts where the step has the same number of rows for each."""
    number, requests = rows.visible_T.numel(), rows.block_table_RB.shape[0]
    each = number // max(requests, 1)
    return each if each * requests == number and 0 < each <= RUN else RUN


def _released(q_THK: Tensor, keys: Planes, members: int) -> bool:
    """Whether score.cu takes these: the released heads and channels, in cache blocks of a power of two of entries."""
    values, scales = keys
    slots = values.shape[1]
    assert values.stride()[1:] == (values.shape[2], 1) and scales.stride()[1:] == (scales.shape[2], 1)
    aligned = (
        values.stride(0) % 16 == values.data_ptr() % 16 == scales.stride(0) % 4 == scales.data_ptr() % 4 == 0
    )
    whole = slots % MEMBERS == 0 and slots & (slots - 1) == 0
    return q_THK.shape[1:] == (HEADS, CHANNELS) and members == MEMBERS and whole and aligned


def _shift(keys: Planes) -> int:
    """The entries of a cache block are this power of two."""
    return keys[0].shape[1].bit_length() - 1


def _entries(keys: Planes, rows: IndexRows) -> int:
    """How many entries a row can see at most: as many as its block table has places for."""
    return rows.block_table_RB.shape[1] * keys[0].shape[1]


def _parts(rows: int, columns: int, *, run: int) -> list[slice]:
    """Rows of one pass: as many as keep the scores within ``SCORE_BYTES``, in whole runs."""
    size = max(1, min(MOST_ROWS, SCORE_BYTES // (4 * max(columns, 1))) // run) * run
    return [slice(low, min(low + size, rows)) for low in range(0, rows, size)]


def _part(rows: IndexRows, part: slice) -> IndexRows:
    assert rows.block_table_RB.shape[1] < 2 or rows.block_table_RB.stride(1) == 1
    return IndexRows(
        request_T=rows.request_T[part].contiguous(),
        visible_T=rows.visible_T[part].contiguous(),
        block_table_RB=rows.block_table_RB,
    )


def _inputs(q: Tensor, weight: Tensor, keys: Planes, rows: IndexRows) -> tuple[Tensor, ...]:
    return q, weight, *keys, rows.request_T, rows.visible_T, rows.block_table_RB


def _strides(keys: Planes, rows: IndexRows, scores: Tensor) -> tuple[ctypes.c_int64, ...]:
    return tuple(ctypes.c_int64(t.stride(0)) for t in (*keys, rows.block_table_RB, scores))


def _scale() -> float:
    return CHANNELS**-0.5 * HEADS**-0.5


def _launch(function: Any, *arguments: Any, device: torch.device) -> None:
    """Call a launcher of the library: tensors by address, floats as such, the attribute and the stream last."""
    stream = torch.cuda.current_stream(device).cuda_stream
    error = function(*map(c_argument, arguments), ctypes.c_int(programmatic(device)), ctypes.c_void_p(stream))
    launched(function.__name__, error)
