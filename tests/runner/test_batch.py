"""StepPlan to ForwardBatch: positions, tables, look-back ids across every boundary, and which logits are wanted."""

import numpy as np
import pytest
import torch

from flashstep.request import Request, SamplingParams
from flashstep.runner.batch import BatchBuilder
from flashstep.runner.histories import History, Slots
from flashstep.runner.resolve import Resolved
from flashstep.step import Admission, Span

PAD = 90
MAP = np.arange(50, dtype=np.int64) + 100
BLOCK = 4


def history(
    length: int, *, output: list[int] | None = None, request_id: str = "r", prompt_logprobs: int | None = None
) -> History:
    params = SamplingParams(max_tokens=9, prompt_logprobs=prompt_logprobs)
    request = Request(id=request_id, prompt=tuple(range(length)), params=params)
    return History(request=request, output=output or [])


@pytest.fixture
def slots() -> Slots:
    return Slots(4, max_model_len=40, block_size=BLOCK)


def builder(trim_window: int | None = None) -> BatchBuilder:
    return BatchBuilder(
        token_map=MAP, pad=PAD, lookback=4, trim_window=trim_window, device=torch.device("cpu")
    )


def admit(slots: Slots, slot: int, one: History, computed: int = 0) -> None:
    slots.take(Admission(request_id=one.request.id, slot=slot, computed=computed), one)


def span(slot: int, start: int, length: int, **more: object) -> Span:
    end = -(-(start + length) // BLOCK)
    blocks = tuple(range(10 * slot, 10 * slot + end)) if start == 0 else ()
    return Span(
        **(
            {
                "slot": slot,
                "start": start,
                "length": length,
                "sample": False,
                "blocks": blocks,
                "window_blocks": blocks,
            }
            | more
        )
    )


def resolved(spans: list[Span], slots: Slots) -> list[Resolved]:
    return [Resolved(span=each, history=slots.holder(each.slot)) for each in spans]


def test_two_requests(slots: Slots) -> None:
    one, other = history(6), history(9, output=[40, 41])
    admit(slots, 2, one)
    admit(slots, 1, other)
    first = [
        span(2, 0, 3, blocks=(20, 21), window_blocks=(20, 21)),
        span(1, 0, 10, blocks=(5, 7, 6), window_blocks=(1, 2, 3)),
    ]
    for each in first:
        slots.extend(each)
    spans = [span(2, 3, 3), span(1, 10, 1, sample=True)]
    for each in spans:
        slots.extend(each)
    batch = builder().build(resolved(spans, slots), slots)
    assert batch.input_ids_T.tolist() == [3, 4, 5, 41]
    assert batch.positions_T.tolist() == [3, 4, 5, 10]
    assert batch.request_T.tolist() == [0, 0, 0, 1]
    assert batch.slot_R.tolist() == [2, 1]
    assert batch.block_table_RB.tolist() == [[20, 21, -1], [5, 7, 6]]
    assert batch.window_table_RB.tolist() == [[20, 21, -1], [1, 2, 3]]
    assert batch.lookback_TN.tolist() == [
        [103, 102, 101, 100],  # across a chunk's edge
        [104, 103, 102, 101],
        [105, 104, 103, 102],
        [141, 140, 108, 107],  # across the end of the prompt
    ]
    assert batch.store_T.tolist() == [True] * 4
    assert batch.logit_rows.tolist() == [3]
    assert batch.tail_start_R is None


def test_the_first_tokens_look_back_on_pad(slots: Slots) -> None:
    admit(slots, 0, history(3))
    spans = [span(0, 0, 3)]
    slots.extend(spans[0])
    assert builder().build(resolved(spans, slots), slots).lookback_TN.tolist() == [
        [100, PAD, PAD, PAD],
        [101, 100, PAD, PAD],
        [102, 101, 100, PAD],
    ]


def test_an_exact_hit(slots: Slots) -> None:
    """The window table starts behind the window; look-back ids come from the tokens of the hit."""
    admit(slots, 0, history(14), computed=12)
    hit = span(0, 12, 2, blocks=(3, 1, 2, 9), window_blocks=(8, 7), window_base=2, sample=True)
    slots.extend(hit)
    batch = builder().build(resolved([hit], slots), slots)
    assert batch.block_table_RB.tolist() == [[3, 1, 2, 9]]
    assert batch.window_table_RB.tolist() == [[-1, -1, 8, 7]]
    assert batch.window_start_R.tolist() == [0]
    assert batch.lookback_TN[0].tolist() == [112, 111, 110, 109]


def test_a_bounded_hit_in_two_spans(slots: Slots) -> None:
    admit(slots, 0, history(20), computed=8)
    first = span(0, 8, 5, blocks=(3, 1, 2, 9, 6), window_blocks=(8, 7, 5), window_base=2, replay=5)
    second = span(0, 13, 7, replay=3, sample=True)
    slots.extend(first)
    batch = builder(trim_window=4).build(resolved([first], slots), slots)
    assert batch.store_T.tolist() == [False] * 5
    assert batch.window_start_R.tolist() == [8]
    assert batch.tail_start_R is not None and batch.tail_start_R.tolist() == [16]  # 20 tokens are known
    assert batch.logit_rows.tolist() == []
    slots.extend(second)
    batch = builder(trim_window=4).build(resolved([second], slots), slots)
    assert batch.store_T.tolist() == [False] * 3 + [True] * 4
    assert batch.window_start_R.tolist() == [8]  # fixed by the admission
    assert batch.tail_start_R is not None and batch.tail_start_R.tolist() == [16]
    assert batch.logit_rows.tolist() == [3]  # counted among the rows from 16 on


def test_wanted_logits(slots: Slots) -> None:
    """Prompt log-probabilities: every row but that of the last prompt token, which is sampled from."""
    for slot, length in enumerate((10, 10, 3)):
        asked = None if slot == 1 else 0
        admit(slots, slot, history(length, output=[40] if length == 3 else None, prompt_logprobs=asked))
    spans = [
        span(0, 0, 6, prompt_logprobs=True),
        span(1, 0, 10, sample=True),
        span(2, 0, 4, prompt_logprobs=True, sample=True),  # recomputed after a preemption
    ]
    for each in spans:
        slots.extend(each)
    assert builder().build(resolved(spans, slots), slots).logit_rows.tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
        15,
        16,
        17,
        19,
    ]
    batch = builder(trim_window=2).build(resolved(spans, slots), slots)
    assert batch.tail_start_R is not None and batch.tail_start_R.tolist() == [0, 8, 0]
    assert batch.logit_rows.tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
        7,
        8,
        9,
        11,
    ]  # rows 6 to 13 of the step were dropped


def test_slots_forget(slots: Slots) -> None:
    admit(slots, 3, history(5))
    slots.extend(span(3, 0, 5))
    with pytest.raises(AssertionError, match="slot 3 is taken"):
        admit(slots, 3, history(5))
    slots.drop(3)
    assert (slots.blocks[3] == -1).all() and (slots.window_blocks[3] == -1).all()
    admit(slots, 3, history(2))
    with pytest.raises(AssertionError, match="rows up to 2"):
        slots.extend(span(3, 0, 2, blocks=()))
    with pytest.raises(AssertionError, match="slot 0 is empty"):
        slots.holder(0)
