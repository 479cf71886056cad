"""When sessions begin: all at once, Poisson, gamma by burstiness, at a constant or a ramped rate (E13).

Takes rates and a random generator; gives seconds after the start. Knows no requests.
"""

import math
from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np

Ramp = Literal["linear", "exponential"]


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """``rate`` sessions a second; inf is all at once.

    Gaps are gamma with shape ``burstiness`` and the rate's mean: 1 is Poisson, less is burstier, more is more even. With a
    ``ramp`` the rate goes from ``start_rate`` to ``end_rate`` along the plan, and ``rate`` counts for nothing.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    ramp: Ramp | None = None
    start_rate: float = 0.0
    end_rate: float = 0.0

    def problems(self) -> list[str]:
        """What makes no arrivals, in sentences."""
        wrong = []
        if not self.rate > 0:
            wrong.append(f"--request-rate is {self.rate:g}; it is above 0, or inf for all at once")
        if not 0 < self.burstiness < math.inf:
            wrong.append(f"--burstiness is {self.burstiness:g}; it is above 0 (1 is Poisson)")
        ends = {"--ramp-up-start-rps": self.start_rate, "--ramp-up-end-rps": self.end_rate}
        if self.ramp is None:
            wrong += [f"{flag} needs --ramp-up-strategy" for flag, value in ends.items() if value]
            return wrong
        wrong += [
            f"{flag} is {value:g}; with --ramp-up-strategy it is above 0 and finite"
            for flag, value in ends.items()
            if not 0 < value < math.inf
        ]
        if self.rate != math.inf:
            wrong.append(
                "--request-rate and --ramp-up-strategy: a ramp has its own rates; leave --request-rate out"
            )
        return wrong

    def rate_at(self, progress: float) -> float:
        """Sessions a second where ``progress`` (0 to 1) of the plan is behind us."""
        if self.ramp is None:
            return self.rate
        progress = min(1.0, progress)
        if self.ramp == "linear":
            return self.start_rate + (self.end_rate - self.start_rate) * progress
        return self.start_rate * (self.end_rate / self.start_rate) ** progress

    def times(
        self, rng: np.random.Generator, *, number: int | None, duration_s: float | None
    ) -> Iterator[float]:
        """Seconds after the start, ascending: ``number`` of them, before ``duration_s``; one of both is given at least.

        A ramp's progress is by ``duration_s`` where that is given, else by ``number``.
        """
        at_s, sent = 0.0, 0
        while number is None or sent < number:
            progress = at_s / duration_s if duration_s else sent / max(1, (number or 1) - 1)
            rate = self.rate_at(progress)
            if rate != math.inf:
                at_s += rng.gamma(self.burstiness, 1.0 / (rate * self.burstiness))
            if duration_s is not None and at_s >= duration_s:
                return
            yield at_s
            sent += 1
