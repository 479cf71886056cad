"""What steps cost on this machine: the table that adaptive verification divides by, measured before the first request.

Takes the built model; gives a ``CostTable``. The rows measured stand at the beginnings of sequences, one short request after the
other: how long contexts make a row dearer is not in the table. What it writes lands in blocks that nobody owns yet.
"""

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from flashstep.config.cache import CacheConfig
from flashstep.model.batch import DraftBatch, ForwardBatch
from flashstep.model.dspark import DraftModel
from flashstep.model.transformer import Transformer
from flashstep.speculate.depth import CostCurve, CostTable

REPEATS = 5
LARGEST_ROWS = 128  # beyond it the curve is a line; on a CPU it is one long before
SHARES = (1.0, 1.5)  # of each power of two
B = TypeVar("B", ForwardBatch, DraftBatch)


def sizes(largest: int) -> list[int]:
    """Row counts from 1 to ``largest``, closer together where they are small."""
    found = {int(share * 2**power) for power in range(largest.bit_length()) for share in SHARES}
    return sorted(size for size in found | {largest} if size <= largest)


def measure(
    model: Transformer,
    draft: DraftModel,
    *,
    lookback: int,
    drafts: int,
    max_num_seqs: int,
    cache: CacheConfig,
    device: torch.device,
) -> CostTable:
    """Time forwards and draft passes; ``drafts`` is k, ``lookback`` the Engram's."""
    requests = min(max_num_seqs, cache.num_blocks, cache.num_window_blocks)
    width = min(1 + drafts, cache.block_size)  # a request's rows, all in one block
    largest = min(LARGEST_ROWS, requests * width)
    with device:  # where the batches are made
        verify = [
            (rows, _seconds(model.forward, _forward_batch(rows, width=width, lookback=lookback)))
            for rows in sizes(largest)
        ]
        drafting = [
            (count, _seconds(lambda batch: _chain(draft, batch, drafts=drafts), _draft_batch(count)))
            for count in sizes(min(requests, max(largest // draft.width, 1)))
        ]
    return CostTable(verify=CostCurve.measured(verify), draft=CostCurve.measured(drafting))


def _chain(draft: DraftModel, batch: DraftBatch, *, drafts: int) -> Tensor:
    block = draft.propose(batch)
    drafts_RP = draft.chain(block, batch.anchor_R, places=drafts)
    return draft.confidences(block, batch.anchor_R, drafts_RP)


def _seconds(run: Callable[[B], Tensor], batch: B) -> float:
    """The median of a few runs, the first one left out. A run is over when one of its numbers is here."""
    run(batch).flatten()[0].item()
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run(batch).flatten()[0].item()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _forward_batch(rows: int, *, width: int, lookback: int) -> ForwardBatch:
    """``rows`` rows of requests that have up to ``width`` of them each; request i owns block i of both kinds."""
    request_T = torch.arange(rows) // width
    count = int(request_T[-1]) + 1
    table_RB = torch.arange(count).unsqueeze(1)
    return ForwardBatch(
        input_ids_T=torch.zeros(rows, dtype=torch.int64),
        positions_T=torch.arange(rows) % width,
        request_T=request_T,
        slot_R=torch.arange(count),
        block_table_RB=table_RB,
        window_table_RB=table_RB,
        window_start_R=torch.zeros(count, dtype=torch.int64),
        store_T=torch.ones(rows, dtype=torch.bool),
        lookback_TN=torch.zeros(rows, lookback, dtype=torch.int64),
        logit_rows=torch.arange(rows),
    )


def _draft_batch(count: int) -> DraftBatch:
    return DraftBatch(
        anchor_R=torch.zeros(count, dtype=torch.int64),
        position_R=torch.ones(count, dtype=torch.int64),
        window_table_RB=torch.arange(count).unsqueeze(1),
        window_start_R=torch.zeros(count, dtype=torch.int64),
    )
