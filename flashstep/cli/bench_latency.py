"""``flashstep bench latency``: how long the engine's steps take, for one request or a batch."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from flashstep.cli.bench_decode import tell_balance
from flashstep.cli.bench_forward import engine_config
from flashstep.cli.flags import too_small
from flashstep.cli.outputs import write
from flashstep.cli.recording import EngineFlags, Recording, told_options
from flashstep.cli.terminal import INTERRUPTED, OUT, note, warn_of_falsified
from flashstep.config.engine_options import EngineOptions
from flashstep.config.presets import released

if TYPE_CHECKING:
    from flashstep.bench.latency import LatencyReport

DECIDED = frozenset({"--max-num-seqs", "--max-model-len", "--enable-prefix-caching"})


@dataclass(frozen=True, kw_only=True)
class BenchLatency:
    """Time the engine's steps from its door: random prompts in, tokens out, greedy unless a temperature is given."""

    model: Path | None = None
    """checkpoint folder (released layout); without it the embedded tiny model"""
    released: bool = False
    """the released DeepSeek-V4.1-Flash's shapes, with dummy weights: mostly with --emulate"""
    input_len: int = 32
    """tokens of each prompt"""
    output_len: int = 128
    """tokens generated for each"""
    batch_size: int = 1
    """requests at once"""
    temperature: float = 0.0
    """0 takes the most probable token; 1 samples from the model's distribution"""
    num_iters_warmup: int = 2
    """rounds that are not counted"""
    num_iters: int = 5
    """rounds that are"""
    output_json: Path | None = None
    """write every step's time to this file"""
    recording: tyro.conf.OmitArgPrefixes[Recording] = field(default_factory=Recording)
    options: EngineFlags = field(default_factory=EngineOptions)

    def run(self) -> int:
        if wrong := self._problems():
            raise ValueError("; ".join(wrong))
        config = engine_config(self.options, self.model, is_released=self.released, decided=DECIDED)
        warn_of_falsified(config.falsifies)

        from flashstep.bench.latency import Workload, measure
        from flashstep.bench.offline import settings_of
        from flashstep.bench.results import as_json

        report = measure(
            config,
            Workload(
                input_len=self.input_len,
                output_len=self.output_len,
                batch_size=self.batch_size,
                temperature=self.temperature,
            ),
            shapes=released() if self.released else None,
            warm_ups=self.num_iters_warmup,
            rounds=self.num_iters,
            progress=note,
        )
        OUT.print(f"{report.model}, {report.layout}, on {report.origin.device}")
        for left_out in report.excluded:
            OUT.print(f"excluded: {left_out}")
        if report.rounds:
            OUT.print(_summary(report))
        tell_balance(report.balance)
        for fault in report.faults:
            OUT.print(f"fault: {fault}")
        self.recording.keep(
            report.entry(
                settings={"rounds": self.num_iters, "warm_ups": self.num_iters_warmup, **settings_of(config)},
                subject={"engine": told_options(self.options)},
                seed=config.seed,
                falsified_by=config.falsifies,
            )
        )
        if self.output_json is not None:
            write(self.output_json, as_json(report))
        return INTERRUPTED if report.faults else 0

    def _problems(self) -> list[str]:
        least = {"input_len": 1, "output_len": 2, "batch_size": 1, "num_iters_warmup": 0, "num_iters": 1}
        wrong = too_small(self, least)
        if not 0 <= self.temperature < math.inf:
            wrong.append(f"--temperature is {self.temperature}; it must be 0 or more")
        if self.released and self.model is not None:
            wrong.append("give --model or --released, not both")
        wrong += self.recording.problems({"--output-json": self.output_json})
        try:
            engine_config(self.options, self.model, is_released=self.released, decided=DECIDED)
        except ValueError as error:
            wrong.append(str(error))
        return wrong


def _summary(report: "LatencyReport") -> str:
    from flashstep.bench.latency import SHARES

    first = sorted(item.first_token_us for item in report.rounds)
    return (
        f"first token: {first[len(first) // 2] / 1e3:,.2f} ms (median of {len(first)} rounds)\n"
        "step: " + ", ".join(f"P{100 * share:g} {report.step_us(share):,.0f} us" for share in SHARES) + "\n"
        f"{report.tokens_a_step:.2f} tokens a step and request, {report.tokens_a_second:,.1f} tokens/s for each of "
        f"{report.workload.batch_size}"
    )
