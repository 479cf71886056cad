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
    ``ramp`` the rate goes from ``start_rate`` to ``end_rate`` along the plan's time, and ``rate`` counts for nothing.
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

    def times(
        self, rng: np.random.Generator, *, number: int | None, duration_s: float | None
    ) -> Iterator[float]:
        """Seconds after the start, ascending: ``number`` of them, before ``duration_s``; one of both is given at least.

        Gaps of mean 1 go through the inverse of the cumulative rate, so that a ramp sends what its rates say. It ends at
        ``duration_s`` where that is given, else where ``number`` are due, and the last rate goes on behind it.
        """
        due, sent = 0.0, 0
        over_s = 0.0 if self.ramp is None else duration_s or (number or 1) / self._mean_rate()
        while number is None or sent < number:
            due += rng.gamma(self.burstiness, 1.0 / self.burstiness)
            at_s = due / self.rate if self.ramp is None else self._when(due, over_s)
            if duration_s is not None and at_s >= duration_s:
                return
            yield at_s
            sent += 1

    def _mean_rate(self) -> float:
        """Over the time of the ramp."""
        first, last = self.start_rate, self.end_rate
        if self.ramp == "linear" or first == last:
            return (first + last) / 2
        return (last - first) / math.log(last / first)

    def _when(self, due: float, over_s: float) -> float:
        """Seconds after the start at which a ramp of ``over_s`` has sent ``due`` sessions."""
        first, last = self.start_rate, self.end_rate
        ramped = self._mean_rate() * over_s
        if due >= ramped:
            return over_s + (due - ramped) / last
        if self.ramp == "linear":
            return 2 * due / (first + math.sqrt(first**2 + 2 * due * (last - first) / over_s))
        growth = math.log(last / first) / over_s
        return math.log1p(growth * due / first) / growth if growth else due / first
