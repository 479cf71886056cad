"""Which rows go through every layer under the bounded policy."""

import msgspec
import pytest

from flashstep.config.presets import released
from flashstep.request import Request, SamplingParams
from flashstep.runner.histories import History
from flashstep.runner.replay import cuts, dropped_count, may_trim, tail_start
from flashstep.step import Span


def span(start: int, length: int) -> Span:
    return Span(slot=0, start=start, length=length, sample=False)


def history(*, prompt_logprobs: int | None = None) -> History:
    params = SamplingParams(max_tokens=1, prompt_logprobs=prompt_logprobs)
    return History(request=Request(id="a", prompt=(1,), params=params))


@pytest.mark.parametrize(("known", "start"), [(1, 0), (8, 0), (9, 1), (100, 92)])
def test_the_last_window_of_what_is_known(known: int, start: int) -> None:
    assert tail_start(history(), known=known, window=8) == start
    assert tail_start(history(prompt_logprobs=0), known=known, window=8) == 0


def test_rows_are_dropped_by_position_wherever_a_chunk_is_cut() -> None:
    assert [
        dropped_count(span(0, 100), 92),
        dropped_count(span(0, 92), 92),
        dropped_count(span(0, 50), 92),
    ] == [92, 92, 50]
    assert [
        dropped_count(span(50, 50), 92),
        dropped_count(span(92, 8), 92),
        dropped_count(span(95, 5), 92),
    ] == [42, 0, 0]


def test_a_tail_matters_while_a_window_reaches_back_before_it() -> None:
    assert cuts(span(92, 8), 92, window=8)  # row 92 would read from 85 on
    assert cuts(span(98, 1), 92, window=8)
    assert not cuts(span(99, 1), 92, window=8)


def test_engram_past_the_last_source_forbids_it() -> None:
    config = released()
    assert may_trim(config)
    assert not may_trim(msgspec.structs.replace(config, engram_layer_ids=(1, 21)))
    assert may_trim(msgspec.structs.replace(config, engram_layer_ids=(1, 20)))
    assert not may_trim(msgspec.structs.replace(config, kv_source_layer_ids=()))
