"""``flashstep bench latency``: the engine's own steps, seen from its door: prompts in, tokens out, a time for each step.

Takes an ``EngineConfig``; steps are launched ahead of commits as in the serving loop. A step's time is from one commit to the
next, so it holds scheduling, sampling and whatever the device waits for, and one forward: where the host computes, a step is
committed before the next one is launched (``offline.runs_beside``). Knows no HTTP and no text.
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec

from flashstep.bench.ledger import Entry, Samples
from flashstep.bench.offline import Balance, balance, runs_beside
from flashstep.bench.origin import Origin, origin
from flashstep.bench.results import percentile
from flashstep.config.engine import EngineConfig
from flashstep.config.model import ModelConfig
from flashstep.engine.engine import Engine
from flashstep.parallel.rank import Rank
from flashstep.request import Request, SamplingParams
from flashstep.runner.build import build

SHARES = (0.5, 0.9, 0.99)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """``batch_size`` requests at once, each of ``input_len`` random tokens that are continued by ``output_len``."""

    input_len: int
    output_len: int
    batch_size: int
    temperature: float = 0.0


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One batch from its arrival to its end. ``steps_us`` are the decoding steps; ``tokens`` what each of them brought."""

    first_token_us: float
    total_us: float
    steps_us: tuple[float, ...]
    tokens: tuple[int, ...]


class LatencyReport(msgspec.Struct, frozen=True, kw_only=True):
    """All rounds, and what they come to: percentiles of the decoding steps, and rates."""

    origin: Origin
    model: str
    layout: str
    excluded: tuple[str, ...]
    workload: Workload
    rounds: tuple[Round, ...]
    faults: tuple[str, ...] = ()
    acceptance_by_position: tuple[float, ...] = ()  # of all rounds, warm-ups too; empty without drafts
    balance: Balance | None = None  # of all steps, prompts' too, where loads are recorded

    def step_us(self, share: float) -> float:
        """The percentile of all decoding steps."""
        return percentile([us for item in self.rounds for us in item.steps_us], share)

    @property
    def tokens_a_step(self) -> float:
        """Tokens that a decoding step brings to one request."""
        steps = sum(len(item.tokens) for item in self.rounds)
        return sum(sum(item.tokens) for item in self.rounds) / steps / self.workload.batch_size

    @property
    def tokens_a_second(self) -> float:
        """Tokens that one request gets while it decodes."""
        tokens = sum(sum(item.tokens) for item in self.rounds)
        return 1e6 * tokens / sum(sum(item.steps_us) for item in self.rounds) / self.workload.batch_size

    def entry(
        self,
        *,
        settings: dict[str, Any],
        subject: dict[str, Any],
        seed: int,
        falsified_by: tuple[str, ...] = (),
    ) -> Entry:
        """For the ledger: a sample for each decoding step, its key the round and the step."""
        numbered = [(number, item) for number, item in enumerate(self.rounds)]
        metrics: dict[str, float] = {}
        if self.rounds:
            metrics = {
                "step_us": self.step_us(0.5),
                "ttft_ms": statistics.median(item.first_token_us for item in self.rounds) / 1e3,
                "acceptance_length": self.tokens_a_step,
                "median_interactivity_tps": self.tokens_a_second,
                "output_tps": self.tokens_a_second * self.workload.batch_size,
            }
        if self.balance is not None:
            metrics["balancedness"] = self.balance.mean
        return Entry(
            kind="latency",
            origin=self.origin,
            settings=msgspec.to_builtins(self.workload) | settings,
            subject={"model": self.model, "layout": self.layout} | subject,
            samples=Samples(
                unit="step",
                keys=tuple(
                    f"{number}/{step}" for number, item in numbered for step in range(len(item.steps_us))
                ),
                columns={
                    "step_us": tuple(us for item in self.rounds for us in item.steps_us),
                    "tokens": tuple(float(tokens) for item in self.rounds for tokens in item.tokens),
                },
            ),
            metrics=metrics,
            seed=seed,
            detail={
                "acceptance_by_position": list(self.acceptance_by_position),
                **({} if self.balance is None else {"balance": msgspec.to_builtins(self.balance)}),
                "first_token_us": [item.first_token_us for item in self.rounds],
                "excluded": list(self.excluded),
            },
            faults=self.faults,
            complete=not self.faults,
            falsified_by=falsified_by,
        )


def measure(
    config: EngineConfig,
    workload: Workload,
    *,
    shapes: ModelConfig | None = None,
    warm_ups: int,
    rounds: int,
    progress: Callable[[str], None] = lambda _: None,
) -> LatencyReport:
    """Build the engine that ``config`` says and run ``workload`` again and again; prompts differ, so that nothing is cached.

    Ctrl-C ends it early, with the rounds that are done.
    """
    model = shapes or ModelConfig.read(config.model)
    longest = workload.input_len + workload.output_len
    if longest > model.max_position_embeddings:
        raise ValueError(
            f"--input-len {workload.input_len} and --output-len {workload.output_len} make {longest} tokens; "
            f"the model's positions end at {model.max_position_embeddings}"
        )
    config = msgspec.structs.replace(
        config,
        max_num_seqs=max(workload.batch_size, 1),
        max_model_len=min(longest + 1, model.max_position_embeddings),
        enable_prefix_caching=False,
    )
    built = build(config, shapes=shapes)
    engine = Engine(built.runner, seed=config.seed)
    chance = random.Random(config.seed)
    taken: list[Round] = []
    faults: list[str] = []
    first = 0  # recorded step that counts
    try:
        for number in range(warm_ups + rounds):
            if number == warm_ups:
                first = built.runner.routing.steps
            taken.append(_round(engine, workload, chance, number=number, ahead=runs_beside(built)))
            progress(f"round {number + 1} of {warm_ups + rounds}: {taken[-1].total_us / 1e3:,.1f} ms")
    except KeyboardInterrupt:
        faults.append(f"it was interrupted behind {max(len(taken) - warm_ups, 0)} of {rounds} rounds")
    acceptance = engine.stats().acceptance
    return LatencyReport(
        origin=origin(),
        model=str(config.model),
        layout="whole" if config.emulate is None else built.layout.name,
        excluded=Rank(built.layout).excluded,
        workload=workload,
        rounds=tuple(taken[warm_ups:]),
        faults=tuple(faults),
        acceptance_by_position=() if acceptance is None else acceptance.position_rates,
        balance=balance(built, first=first),
    )


def _round(engine: Engine, workload: Workload, chance: random.Random, *, number: int, ahead: bool) -> Round:
    size = engine.ready.vocab_size
    params = SamplingParams(max_tokens=workload.output_len, temperature=workload.temperature, ignore_eos=True)
    for which in range(workload.batch_size):
        prompt = tuple(chance.choices(range(size), k=workload.input_len))
        engine.add(Request(id=f"{number}-{which}", prompt=prompt, params=params))
    started = time.perf_counter()
    commits: list[tuple[float, int]] = []  # seconds, tokens
    for outputs in engine.steps(ahead=ahead):
        commits.append((time.perf_counter() - started, sum(len(output.tokens) for output in outputs)))
    first = next(place for place, (_, tokens) in enumerate(commits) if tokens)
    decoding = [
        (1e6 * (commits[place][0] - commits[place - 1][0]), commits[place][1])
        for place in range(first + 1, len(commits))
        if commits[place][1]
    ]
    return Round(
        first_token_us=1e6 * commits[first][0],
        total_us=1e6 * commits[-1][0],
        steps_us=tuple(us for us, _ in decoding),
        tokens=tuple(tokens for _, tokens in decoding),
    )
