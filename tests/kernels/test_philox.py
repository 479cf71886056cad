"""Philox4x32-10 against Random123's published known answers, and the numbers made of it."""

import numpy as np
import pytest
import torch

from flashstep.kernels.sampling.philox import Purpose, gumbel, philox4x32, uniforms

KNOWN_ANSWERS = [  # counter, key, result: kat_vectors of Random123, "philox4x32 10"
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = philox4x32([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
    assert tuple(int(word) for word in words) == expected


def test_which_counter_stands_for_which_number() -> None:
    seed = (0x299F31D0 << 32 | 0xA4093822) - 2**64 if 0x299F31D0 >> 31 else 0x299F31D0 << 32 | 0xA4093822
    row = uniforms(torch.tensor([seed]), torch.tensor([17]), count=10)[0]
    for number in (0, 5, 9):
        words = philox4x32(
            [torch.tensor(c) for c in (number // 4, 17, 0, 0)],
            [torch.tensor(0xA4093822), torch.tensor(0x299F31D0)],
        )
        assert row[number] == (int(words[number % 4]) + 0.5) / 2**32


def test_numbers_are_uniform_and_open() -> None:
    numbers = uniforms(torch.arange(8), torch.arange(8), count=4001).flatten().numpy()
    assert numbers.min() > 0 and numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=64, range=(0, 1))
    expected = numbers.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 103.4  # chi-square, 63 degrees of freedom, p = 0.001


def test_rows_do_not_depend_on_one_another() -> None:
    seeds, positions = torch.tensor([5, -7, 5, 2**62]), torch.tensor([0, 3, 1, 0])
    together = gumbel(seeds, positions, count=33)
    for row in range(4):
        assert torch.equal(together[row], gumbel(seeds[row : row + 1], positions[row : row + 1], count=33)[0])
    assert torch.equal(together[:, :9], gumbel(seeds, positions, count=9))
    assert len({tuple(r.tolist()) for r in together}) == 4


def test_gumbel_moments() -> None:
    noise = gumbel(torch.arange(50), torch.zeros(50, dtype=torch.int64), count=4000)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(1.6449, rel=0.02)


def test_purposes_and_offsets_are_counter_words() -> None:
    seeds, positions = torch.tensor([9, 9, 9]), torch.tensor([4, 4, 5])
    drawn = uniforms(seeds, positions, count=6, purpose=Purpose.DRAFT, offsets_R=torch.tensor([0, 3, 3]))
    for row, (position, offset) in enumerate([(4, 0), (4, 3), (5, 3)]):
        words = philox4x32(
            [torch.tensor(c) for c in (1, position, int(Purpose.DRAFT), offset)],
            [torch.tensor(9), torch.tensor(0)],
        )
        assert drawn[row, 5] == (int(words[1]) + 0.5) / 2**32


def test_no_two_draws_share_numbers() -> None:
    """Tokens, drafts and verdicts of some steps: every purpose, position and offset, two seeds. 32 bits may collide by chance."""
    numbers = torch.cat(
        [
            uniforms(
                torch.tensor([1, -1]),
                torch.tensor([position, position]),
                count=20,
                purpose=purpose,
                offsets_R=torch.tensor([offset, offset]),
            ).flatten()
            for purpose in Purpose
            for position in (-1, 0, 1, 2)
            for offset in range(4)
        ]
    )
    assert numbers.unique().numel() >= numbers.numel() - 1


def test_no_offset_is_offset_zero() -> None:
    seeds, positions = torch.tensor([3, -8]), torch.tensor([0, 77])
    zeros = torch.zeros(2, dtype=torch.int64)
    assert torch.equal(gumbel(seeds, positions, count=7), gumbel(seeds, positions, count=7, offsets_R=zeros))
