"""Where rows write and what they see: places through block tables, -1 where nothing may be written, cut windows."""

import torch

from flashstep.kernels import choose_ops
from flashstep.model.batch import ForwardBatch
from flashstep.model.rope import angles_of
from flashstep.model.rows import Rows, rows_of
from tests.model.driver import CPU

FREQUENCIES = torch.ones(2)


def rows(positions: list[int], requests: list[int], *, store: list[bool] | None = None) -> Rows:
    """Two requests, blocks of 4 tokens: [9, 3, 5] and [1, 7, -1]; the first's first window block is gone."""
    count = len(positions)
    batch = ForwardBatch(
        input_ids_T=torch.zeros(count, dtype=torch.int64),
        positions_T=torch.tensor(positions),
        request_T=torch.tensor(requests),
        slot_R=torch.tensor([4, 2]),
        block_table_RB=torch.tensor([[9, 3, 5], [1, 7, -1]]),
        window_table_RB=torch.tensor([[-1, 8, 6], [2, 0, -1]]),
        window_start_R=torch.tensor([4, 0]),
        store_T=torch.tensor(store or [True] * count),
        lookback_TN=torch.zeros(count, 4, dtype=torch.int64),
        logit_rows=torch.arange(count),
    )
    return rows_of(
        batch,
        angles=angles_of(FREQUENCIES, FREQUENCIES, device=CPU),
        block_size=4,
        ops=choose_ops(CPU),
    )


def test_window_slots_follow_the_table() -> None:
    assert rows([3, 4, 9, 0, 7], [0, 0, 0, 1, 1]).window_slot_T.tolist() == [-1, 32, 25, 8, 3]


def test_entry_slots_of_both_ratios() -> None:
    r = rows([4, 5, 8, 0, 3, 9], [0, 0, 0, 1, 1, 1])
    assert r.entry_slot_T[1].tolist() == [12, 13, 20, 4, 7, -1]
    assert r.entry_slot_T[2].tolist() == [-1, 6, -1, -1, 3, -1]


def test_replayed_rows_write_no_entries() -> None:
    r = rows([4, 5, 6, 7], [0] * 4, store=[False, False, True, True])
    assert r.entry_slot_T[1].tolist() == [-1, -1, 14, 15]
    assert r.entry_slot_T[2].tolist() == [-1, -1, -1, 7]
    assert r.window_slot_T.tolist() == [32, 33, 34, 35]


def test_visible_entries_are_complete_ones() -> None:
    """Trap 16: at an even position the own group of ratio 2 is still open."""
    r = rows([0, 1, 2, 5], [1] * 4)
    assert r.index_rows[2].visible_T.tolist() == [0, 1, 1, 3]
    assert r.index_rows[1].visible_T.tolist() == [1, 2, 3, 6]


def test_the_tail_starts_at_a_position_and_so_do_its_windows() -> None:
    r = rows([4, 5, 6, 7, 0, 1], [0] * 4 + [1] * 2)
    start = torch.tensor([6, 0])
    kept = r.keep(torch.tensor([2, 3, 4, 5]))
    assert kept.positions_T.tolist() == [6, 7, 0, 1] and kept.slot_T.tolist() == [4, 4, 2, 2]
    assert kept.cut_windows(start).attention.window_start_R.tolist() == [6, 0]
    earlier = torch.tensor([2, 0])  # a replay begins at 4 already
    assert r.cut_windows(earlier).attention.window_start_R.tolist() == [4, 0]
    assert r.keep(torch.tensor([], dtype=torch.int64)).positions_T.tolist() == []
