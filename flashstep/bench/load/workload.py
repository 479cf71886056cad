"""What a run sends, and when: the plan of sessions, the warm-ups before it and the probes beside it.

Takes what was asked for and the words a server knows; gives sessions with their times. Knows no network.
"""

import itertools
import math
from collections.abc import Iterator

import msgspec
import numpy as np

from flashstep.bench.load.arrivals import Arrivals
from flashstep.bench.load.bodies import Shape
from flashstep.bench.load.lengths import UNCHECKED, Range, Words
from flashstep.bench.load.prompts import PROBE, WARM_UP, PromptFile, RandomPrompts, Session

ARRIVALS = 9  # a stream of random numbers beside those of prompts
PROBE_ARRIVALS = 10
PROBE_WORDS, PROBE_OUTPUT = 16, 1
WARM_UP_BEFORE_FILE = RandomPrompts(input_len=Range(128, 128), output_len=Range(16, 16))
Plan = Iterator[tuple[float, Session]]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent and when. ``source`` makes the prompts, or is a file of them.

    ``num_prompts`` are sessions; it or ``duration_s`` ends the run, whichever comes first. ``probe_rate`` is of small
    requests beside the load, a second. ``slos_ms`` are limits by "ttft", "tpot", "e2el".
    """

    source: RandomPrompts | PromptFile
    shape: Shape
    arrivals: Arrivals = Arrivals()
    max_concurrency: int | None = None
    num_prompts: int | None = None
    duration_s: float | None = None
    num_warmups: int = 0
    probe_rate: float = 0.0
    slos_ms: dict[str, float] = {}
    seed: int = 0

    @property
    def is_paced(self) -> bool:
        """Sessions have times of their own to begin at, so that one that waits for a place is late."""
        return self.arrivals.ramp is not None or not math.isinf(self.arrivals.rate)

    def plan(self, words: Words | None) -> Plan:
        """Sessions with the seconds after the start at which they begin; the same for the same seed. ``words`` are for random
        prompts; ``ValueError`` where prompts are too short for the server's template."""
        rng = np.random.default_rng([self.seed, ARRIVALS])
        if isinstance(self.source, PromptFile):
            listed = self.source.sessions[: self.num_prompts]
            sessions, number = iter(listed), len(listed)
        else:
            assert words is not None
            sessions = self.source.sessions(words, self.seed, chat=self.shape.endpoint == "chat")
            number = self.num_prompts
        times = self.arrivals.times(rng, number=number, duration_s=self.duration_s)
        return zip(times, sessions, strict=False)

    def warm_ups(self, words: Words | None) -> list[Session]:
        """Prompts like those of the run, but others: what a warm-up leaves in the server's prefix cache must not help the run.

        Before a file's prompts, random words.
        """
        chat = self.shape.endpoint == "chat"
        source = WARM_UP_BEFORE_FILE if isinstance(self.source, PromptFile) else self.source
        sessions = source.sessions(words or UNCHECKED, self.seed, stream=WARM_UP, chat=chat)
        numbered = enumerate(itertools.islice(sessions, self.num_warmups))
        return [
            msgspec.structs.replace(session, key=f"warm-up-{number}", turns=session.turns[:1])
            for number, session in numbered
        ]

    def probes(self) -> Plan:
        """Small prompts by Poisson, without end."""
        small = RandomPrompts(
            input_len=Range(PROBE_WORDS, PROBE_WORDS), output_len=Range(PROBE_OUTPUT, PROBE_OUTPUT)
        )
        sessions = small.sessions(UNCHECKED, self.seed, stream=PROBE, chat=self.shape.endpoint == "chat")
        rng = np.random.default_rng([self.seed, PROBE_ARRIVALS])
        times = Arrivals(rate=self.probe_rate).times(rng, number=None, duration_s=math.inf)
        named = (msgspec.structs.replace(session, key=f"probe-{session.key}") for session in sessions)
        return zip(times, named, strict=False)
