"""``flashstep bench test``: the tests of a comparison on given numbers, to do a published analysis again."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from flashstep.cli.extras import require_bench
from flashstep.cli.terminal import OUT

if TYPE_CHECKING:
    from flashstep.bench.stats.paired import Interval, Tested


@dataclass(frozen=True, kw_only=True)
class McNemar:
    """Exact McNemar: items that only one arm has right. With --of N items also the difference, its SE and interval."""

    only_a: tyro.conf.Positional[int]
    """items that only A has right"""
    only_b: tyro.conf.Positional[int]
    """items that only B has right"""
    of: int | None = None
    """all items, for the paired difference in percentage points"""
    confidence: float = 0.95
    """of the interval"""

    def run(self) -> None:
        from flashstep.bench.stats.paired import discordant, mcnemar

        tested = mcnemar(self.only_a, self.only_b)
        OUT.print(f"McNemar {tested.count}: p = {tested.p:.4g} (smallest possible {tested.smallest:.3g})")
        if self.of is not None:
            found = discordant(self.only_a, self.only_b, of=self.of, confidence=self.confidence)
            OUT.print(
                f"B - A {100 * found.mean:+.3f} points, SE {100 * found.se:.3f}, {_interval(found.interval, 100)}"
            )


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Exchange of runs: does the labelling of the runs matter? With jobs, runs change places within their own job only."""

    a: tuple[float, ...]
    """a value of each run of A"""
    b: tuple[float, ...]
    """a value of each run of B"""
    jobs_a: tuple[str, ...] = ()
    """the job of each run of A, where runs can be exchanged within jobs only"""
    jobs_b: tuple[str, ...] = ()
    """the job of each run of B"""
    confidence: float = 0.95
    """of the interval"""

    def run(self) -> None:
        from flashstep.bench.stats.paired import exchange

        if bool(self.jobs_a) != bool(self.jobs_b):
            raise ValueError("--jobs-a and --jobs-b go together")
        found = exchange(self.a, self.b, self.jobs_a or None, self.jobs_b or None, confidence=self.confidence)
        OUT.print(f"exchange of {len(self.a)} and {len(self.b)} runs: {_p(found.tested)}")
        OUT.print(f"B - A {found.difference:+.6g}, {_interval(found.interval)}")


@dataclass(frozen=True, kw_only=True)
class Welch:
    """Welch's t of two arms as papers print them: MEAN SD RUNS of A, then of B."""

    a: tyro.conf.Positional[tuple[float, float, int]]
    """mean, standard deviation and number of runs of A"""
    b: tyro.conf.Positional[tuple[float, float, int]]
    """of B"""
    confidence: float = 0.95
    """of the interval"""

    def run(self) -> None:
        from flashstep.bench.stats.paired import Summary, welch

        arms = [Summary(mean=mean, sd=sd, n=n) for mean, sd, n in (self.a, self.b)]
        found = welch(*arms, confidence=self.confidence)
        if found.t is None or found.df is None or found.interval is None:
            raise ValueError("neither arm has any spread, so that there is no t")
        OUT.print(
            f"Welch: t = {found.t:.3f}, {found.df:.2f} degrees of freedom, p = {found.p:.3g}\n"
            f"B - A {found.difference:+.6g}, {_interval(found.interval)}"
        )


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Paired differences from a file, one B - A a line: sign-flip, mean with SE and t interval, median and range, bootstrap."""

    file: tyro.conf.Positional[Path]
    """numbers, one a line; - reads standard input"""
    confidence: float = 0.95
    """of the intervals"""
    seed: int = 0
    """of drawn signs and of the bootstrap"""

    def run(self) -> None:
        import statistics
        import sys

        from flashstep.bench.stats.bootstrap import of_differences
        from flashstep.bench.stats.paired import mean_difference, sign_flip

        try:
            text = sys.stdin.read() if str(self.file) == "-" else self.file.read_text(encoding="utf-8")
            values = [float(word) for word in text.split()]
            if not all(map(math.isfinite, values)):
                raise ValueError("nan or inf is no difference")
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.file}: {error}; it must have one number a line") from None
        found = mean_difference(values, confidence=self.confidence)
        OUT.print(
            f"sign-flip over {sum(map(bool, values))} of {len(values)} pairs: {_p(sign_flip(values, seed=self.seed))}"
        )
        OUT.print(f"mean {found.mean:+.6g}, SE {found.se:.4g}, {_interval(found.interval)}")
        OUT.print(f"median {statistics.median(values):+.6g}, range {min(values):+.6g} to {max(values):+.6g}")
        resampled = of_differences(values, unit="pair", confidence=self.confidence, seed=self.seed)
        if resampled is not None:
            OUT.print(f"bootstrap: {_interval(resampled)}")


Test = (
    Annotated[McNemar, tyro.conf.subcommand("mcnemar")]
    | Annotated[Runs, tyro.conf.subcommand("runs")]
    | Annotated[Welch, tyro.conf.subcommand("welch")]
    | Annotated[Pairs, tyro.conf.subcommand("pairs")]
)


@dataclass(frozen=True, kw_only=True)
class BenchTest:
    """The tests of bench compare on given numbers, to do a published analysis again."""

    test: Test

    def run(self) -> int:
        require_bench("scipy", "numpy")
        if not 0 < self.test.confidence < 1:
            raise ValueError(f"--confidence is {self.test.confidence}; it must be between 0 and 1")
        self.test.run()
        return 0


def _p(tested: "Tested") -> str:
    return f"p = {tested.count} = {tested.p:.3g} (smallest possible {tested.smallest:.3g})"


def _interval(interval: "Interval", scale: float = 1) -> str:
    low, high = scale * interval.low, scale * interval.high
    return f"{100 * interval.confidence:.3g}% interval {low:+.6g} to {high:+.6g} ({interval.words})"
