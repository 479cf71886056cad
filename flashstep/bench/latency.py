"""``flashstep bench latency``: the engine's own steps, seen from its door: prompts in, tokens out, a time for each step.

Takes an ``EngineConfig``; steps are launched ahead of commits as in the serving loop. A step's time is from one commit to the
next, so it holds scheduling, sampling and whatever the device waits for. Knows no HTTP and no text.
"""

import random
import time
from collections.abc import Callable

import msgspec

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


def measure(
    config: EngineConfig,
    workload: Workload,
    *,
    shapes: ModelConfig | None = None,
    warm_ups: int,
    rounds: int,
    progress: Callable[[str], None] = lambda _: None,
) -> LatencyReport:
    """Build the engine that ``config`` says and run ``workload`` again and again; prompts differ, so that nothing is cached."""
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
    taken = []
    for number in range(warm_ups + rounds):
        taken.append(_round(engine, workload, chance, number=number))
        progress(f"round {number + 1} of {warm_ups + rounds}: {taken[-1].total_us / 1e3:,.1f} ms")
    return LatencyReport(
        origin=origin(),
        model=str(config.model),
        layout="whole" if config.emulate is None else built.layout.name,
        excluded=Rank(built.layout).excluded,
        workload=workload,
        rounds=tuple(taken[warm_ups:]),
    )


def _round(engine: Engine, workload: Workload, chance: random.Random, *, number: int) -> Round:
    size = engine.ready.vocab_size
    params = SamplingParams(max_tokens=workload.output_len, temperature=workload.temperature, ignore_eos=True)
    for which in range(workload.batch_size):
        prompt = tuple(chance.choices(range(size), k=workload.input_len))
        engine.add(Request(id=f"{number}-{which}", prompt=prompt, params=params))
    started = time.perf_counter()
    commits: list[tuple[float, int]] = []  # seconds, tokens
    for outputs in engine.steps():
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
