"""One core of the server carries 50,000 streamed tokens a second; a benchmark (``--bench``, quiet machine), best of three."""

import os

import pytest

from tests.server.measure_streaming import measure

RATE = 70_000  # tokens a second that the stub makes


@pytest.mark.bench
@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="needs a core for the server and one for its surroundings"
)
@pytest.mark.parametrize("chat", [True, False])
def test_fifty_thousand_tokens_a_second(chat: bool) -> None:
    rates = [
        measure(streams=64, tokens=1000, run=1, rate=RATE, chat=chat)["tokens_per_second"] for _ in range(3)
    ]
    assert max(rates) >= 50_000, rates
