"""Pair pooling: alignment to absolute positions, any cut, neighbours, and the ring that carries the open half."""

import pytest
import torch

from flashstep.kernels.fused import reference
from tests.kernels.implementations import DEVICE

LENGTH, CHANNELS, SLOTS, RING = 40, 16, 3, 8


def rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(LENGTH, 2 * CHANNELS, generator=generator).to(DEVICE)
    return both[:, :CHANNELS], both[:, CHANNELS:]  # halves of one product, as in the model


def pooled(value: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """bf16 [LENGTH / 2, C]: softmax over the pair, said differently."""
    weights = torch.softmax(score.double().unflatten(0, (-1, 2)), dim=1)
    return (value.double().unflatten(0, (-1, 2)) * weights).sum(1).bfloat16()


def run(pieces: list[tuple[int, int, int]], data: dict) -> dict:
    """Steps of (slot, start, stop) runs -> the closed rows by (slot, position)."""
    tail = torch.full((SLOTS, RING, 2, CHANNELS), float("nan"), device=DEVICE)
    closed = {}
    for step in pieces:
        value = torch.cat([data[slot][0][start:stop] for slot, start, stop in step])
        score = torch.cat([data[slot][1][start:stop] for slot, start, stop in step])
        slot_T = torch.cat([torch.full((stop - start,), slot) for slot, start, stop in step]).to(DEVICE)
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in step]).to(DEVICE)
        place = {"tail": tail, "slot_T": slot_T, "positions_T": positions}
        out = reference.pool_pairs(value, score, **place)
        reference.store_tail(value, score, **place)
        assert not out[positions % 2 == 0].any()
        closed |= {(int(s), int(p)): row for s, p, row in zip(slot_T, positions, out, strict=True) if p % 2}
    return closed


CUTS = {
    "whole": [[(0, 0, 40)]],
    "one by one": [[(0, t, t + 1)] for t in range(40)],
    "odd": [[(0, 0, 7)], [(0, 7, 10)], [(0, 10, 11)], [(0, 11, 40)]],
    "the row before is another slot's": [
        [(0, 0, 6), (2, 0, 7)],
        [(0, 6, 7), (2, 7, 8)],
        [(0, 7, 40), (2, 8, 40)],
    ],
    "shared steps": [[(0, 0, 5), (2, 0, 12)], [(2, 12, 13), (0, 5, 6)], [(0, 6, 40), (2, 13, 40)]],
}


@pytest.mark.parametrize("cuts", CUTS)
def test_pool_pairs_and_store_tail_under_any_cut(cuts: str) -> None:
    data = {slot: rows(slot) for slot in (0, 2)}
    closed = run(CUTS[cuts], data)
    for slot in {slot for step in CUTS[cuts] for slot, _, _ in step}:
        want = pooled(*data[slot])
        for group in range(LENGTH // 2):
            assert torch.equal(closed[slot, 2 * group + 1], want[group])


def test_a_rejected_row_is_overwritten_by_position() -> None:
    """A04: rows 8 .. 12 are run, rejected from 9 on, and run again with other values; the pair (8, 9) is the new one."""
    data = {0: rows(0)}
    other = {0: rows(1)}
    tail = torch.full((SLOTS, RING, 2, CHANNELS), float("nan"), device=DEVICE)

    def step(source: dict, start: int, stop: int) -> torch.Tensor:
        positions = torch.arange(start, stop, device=DEVICE)
        place = {
            "tail": tail,
            "slot_T": torch.zeros(stop - start, dtype=torch.int64, device=DEVICE),
            "positions_T": positions,
        }
        out = reference.pool_pairs(source[0][0][start:stop], source[0][1][start:stop], **place)
        reference.store_tail(source[0][0][start:stop], source[0][1][start:stop], **place)
        return out

    step(data, 0, 13)
    value, score = (torch.cat((a[:9], b[9:])) for a, b in zip(data[0], other[0], strict=True))
    assert torch.equal(step({0: (value, score)}, 9, 12)[::2], pooled(value, score)[4:6])


def test_store_tail_keeps_the_last_rows_of_each_slot() -> None:
    value, score = rows(3)
    tail = torch.zeros(SLOTS, RING, 2, CHANNELS, device=DEVICE)
    slot = torch.tensor([1] * 30 + [2] * 10, device=DEVICE)
    positions = torch.cat((torch.arange(100, 130), torch.arange(10))).to(DEVICE)
    reference.store_tail(value, score, tail=tail, slot_T=slot, positions_T=positions)
    for row in (*range(22, 30), *range(32, 40)):
        assert torch.equal(tail[slot[row], positions[row] % RING], torch.stack((value[row], score[row])))
    assert not tail[0].any()


@pytest.mark.parametrize("channels", [512, 48])
def test_rows_that_pad_write_nothing(channels: int) -> None:
    """A captured graph's padding rows have slot -1, wherever they stand."""
    generator = torch.Generator().manual_seed(4)
    value, score = torch.randn(2, 7, channels, generator=generator).to(DEVICE)
    tail = torch.randn(SLOTS, RING, 2, channels, generator=generator).to(DEVICE)
    slot = torch.tensor([2, 2, 0, 1, -1, -1, -1], device=DEVICE)
    positions = torch.tensor([10, 11, 9, 12, -1, -1, 3], device=DEVICE)
    want_tail = tail.clone()
    reference.store_tail(value[:4], score[:4], tail=want_tail, slot_T=slot[:4], positions_T=positions[:4])
    reference.store_tail(value, score, tail=tail, slot_T=slot, positions_T=positions)
    assert torch.equal(tail, want_tail)
