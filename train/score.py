"""Teacher-forced scores: does the arg-max of every answer token equal the reference? The same event as greedy decoding
producing that text. Cases of ``train.cases`` are packed into batches of the trainer's own shapes.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from train.cases import Case
from train.data import ALIGN, Batch
from train.dialogue import Encoder, render


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a case's answer is predicted: rows ``start`` to ``end`` (exclusive) of ``row`` in batch ``batch``."""

    batch: int
    row: int
    start: int
    end: int


def pack_cases(
    cases: Sequence[Case], encoder: Encoder, *, rows: int, row: int
) -> tuple[list[Batch], list[Place]]:
    """Batches of ``rows`` x ``row`` tokens holding every case, and where each answer lies."""
    batches: list[Batch] = []
    places: list[Place] = []
    used: list[int] = []
    numbers: list[int] = []
    for case in cases:
        prompt, answer = encoder.prompt_and_answer(render(case.dialogue))
        ids = prompt + answer
        assert len(ids) <= row, f"a {case.kind} case has {len(ids)} tokens, a row {row}"
        index = next((i for i, u in enumerate(used) if u + len(ids) <= row), len(used))
        if index == len(used):
            if index % rows == 0:
                batches.append(_empty(rows, row))
            used.append(0)
            numbers.append(0)
        batch, line, start = batches[index // rows], index % rows, used[index]
        end = start + len(ids)
        batch.ids[line, start:end] = ids
        batch.document[line, start:end] = 2 * numbers[index]
        batch.document[line, end:] = 2 * numbers[index] + 1
        first = start + len(prompt) - 1
        batch.weight[line, first : end - 1] = 1
        places.append(Place(index // rows, line, first, end - 1))
        used[index] = -(-end // ALIGN) * ALIGN
        numbers[index] += 1
    return batches, places


def _empty(rows: int, row: int) -> Batch:
    shape = (rows, row)
    return Batch(np.full(shape, 2, np.int64), np.ones(shape, np.int64), np.zeros(shape, np.float32))


Forward = Callable[[Tensor, Tensor], Tensor]  # ids, documents [B, T] -> logits [B, T, V]


@dataclasses.dataclass(frozen=True)
class Score:
    """``exact[i]``: case i wholly right; ``tokens``: share of right answer tokens."""

    exact: tuple[bool, ...]
    tokens: float

    @property
    def rate(self) -> float:
        return sum(self.exact) / max(1, len(self.exact))

    def __str__(self) -> str:
        return f"{sum(self.exact)}/{len(self.exact)} ({self.rate:.1%}), tokens {self.tokens:.2%}"


def score(batches: Sequence[Batch], places: Sequence[Place], forward: Forward, device: torch.device) -> Score:
    """Run ``forward`` on all batches and compare at every place."""
    right: list[np.ndarray] = []
    for batch in batches:
        ids, documents = (torch.from_numpy(a).to(device) for a in (batch.ids, batch.document))
        best = forward(ids, documents).detach().argmax(-1)
        right.append((best[:, :-1] == ids[:, 1:]).cpu().numpy())
    marks = [right[p.batch][p.row, p.start : p.end] for p in places]
    return Score(tuple(bool(m.all()) for m in marks), float(np.concatenate(marks).mean()))
