"""Which rows go through every layer under the bounded policy."""

import msgspec
import pytest

from flashstep.config.presets import released
from flashstep.runner.replay import kept_count, kept_rows, may_trim
from flashstep.step import Span


def span(length: int, *, prompt_logprobs: bool = False) -> Span:
    return Span(slot=0, start=0, length=length, sample=False, prompt_logprobs=prompt_logprobs)


@pytest.mark.parametrize(("length", "count"), [(1, 1), (7, 7), (8, 8), (9, 8), (100, 8)])
def test_the_last_window_of_a_span(length: int, count: int) -> None:
    assert kept_count(span(length), window=8) == count
    assert kept_count(span(length, prompt_logprobs=True), window=8) == length


def test_rows_of_a_step() -> None:
    kept = kept_rows([span(1), span(6), span(4, prompt_logprobs=True), span(3)], window=3)
    assert kept is not None
    assert kept.tolist() == [0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert kept_rows([span(1), span(3), span(9, prompt_logprobs=True)], window=3) is None


def test_engram_past_the_last_source_forbids_it() -> None:
    config = released()
    assert may_trim(config)
    assert not may_trim(msgspec.structs.replace(config, engram_layer_ids=(1, 21)))
    assert may_trim(msgspec.structs.replace(config, engram_layer_ids=(1, 20)))
    assert not may_trim(msgspec.structs.replace(config, kv_source_layer_ids=()))
