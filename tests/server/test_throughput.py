"""One core of the server carries 50,000 streamed tokens a second.

The machine is shared (another test worker, at least), and the server's core with it: what counts is the better of what it carried
and of what it carried for each second that it had the core; the best of six.
"""

import os

import pytest

from tests.server.measure_streaming import measure

RATE = 70_000  # what the stub makes


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="needs a core for the server and one for its surroundings"
)
@pytest.mark.parametrize("chat", [True, False])
def test_fifty_thousand_tokens_a_second(chat: bool) -> None:
    best = 0.0
    for _ in range(6):
        measured = measure(streams=64, tokens=1000, run=1, rate=RATE, chat=chat)
        best = max(best, measured["tokens_per_second"], measured["tokens_per_cpu_second"])
        if best >= 50_000:
            return
    raise AssertionError(f"{best} tokens a second")
