"""Engram on a GPU: wherever the rows lie, and whether they are fetched ahead of the layers before or not, the same logits."""

import pytest
import torch

from flashstep.cache.groups import CacheGroups
from flashstep.cache.pool import CachePool
from flashstep.config.engram import Place
from flashstep.engram.table import EngramTable
from flashstep.kernels import choose_ops
from flashstep.model import engram
from flashstep.model.batch import ForwardBatch
from flashstep.model.transformer import Transformer
from tests.model import tiny

ROWS, BLOCK = 600, 8


def batch(config, device: torch.device) -> ForwardBatch:
    """One prompt of ``ROWS`` tokens."""
    tokens = torch.tensor(tiny.random_tokens(ROWS, config=config))
    compressed = tiny.token_map(config)[tokens]
    columns = config.engram_max_ngram_size
    padded = torch.cat((tiny.token_map(config)[config.engram_pad_token_id].repeat(columns - 1), compressed))
    lookback = torch.stack([padded[columns - 1 - s : columns - 1 - s + ROWS] for s in range(columns)], dim=1)
    table = torch.arange(-(-ROWS // BLOCK)).unsqueeze(0)
    at = {
        "input_ids_T": tokens,
        "positions_T": torch.arange(ROWS),
        "request_T": torch.zeros(ROWS, dtype=torch.int64),
        "slot_R": torch.zeros(1, dtype=torch.int64),
        "block_table_RB": table,
        "window_table_RB": table,
        "window_start_R": torch.zeros(1, dtype=torch.int64),
        "store_T": torch.ones(ROWS, dtype=torch.bool),
        "lookback_TN": lookback,
    }
    return ForwardBatch(**{name: value.to(device) for name, value in at.items()}, logit_rows=None)


@pytest.mark.gpu
@torch.inference_mode()
def test_rows_anywhere_and_ahead_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    config = tiny.configuration("A")
    weights, tables = tiny.random_weights(config)
    weights = {name: weight.to(device) for name, weight in weights.items()}
    found = []
    for where in (Place.DEVICE, Place.PINNED):
        for rows in (1, ROWS + 1):
            monkeypatch.setattr(engram, "AHEAD_ROWS", rows)
            blocks = -(-ROWS // BLOCK)
            pool = CachePool(
                CacheGroups.of(config),
                num_blocks=blocks,
                num_window_blocks=blocks,
                block_size=BLOCK,
                num_slots=1,
                device=device,
            )
            placed = {
                layer: EngramTable.place(*table.planes, where, device=device)
                for layer, table in tables.items()
            }
            model = Transformer(config, weights, ops=choose_ops(device), pool=pool, engram_tables=placed)
            step = batch(config, device)
            found += [model.forward(step) for _ in range(3)]
    assert all(torch.equal(logits, found[0]) for logits in found) and bool(found[0].isfinite().all())
