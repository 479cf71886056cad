"""``flashstep bench decode``: how long steps of decoding take behind contexts that nobody had to compute."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from flashstep.cli.bench_forward import SIZED, engine_config
from flashstep.cli.flags import too_small
from flashstep.cli.recording import EngineFlags, Recording
from flashstep.cli.terminal import INTERRUPTED, OUT, note, warn_of_falsified
from flashstep.config.engine_options import EngineOptions
from flashstep.config.presets import released

if TYPE_CHECKING:
    from flashstep.bench.decode import DecodeReport
    from flashstep.bench.offline import Balance


@dataclass(frozen=True, kw_only=True)
class BenchDecode:
    """Time steady-state decoding at a context: caches are filled as if they had been handed over, so no prompt is computed."""

    model: Path | None = None
    """checkpoint folder (released layout); without it the embedded tiny model"""
    released: bool = False
    """the released DeepSeek-V4.1-Flash's shapes, with dummy weights: mostly with --emulate"""
    context: int = 4096
    """tokens of each request before the first step"""
    batch_size: int = 1
    """requests that decode together"""
    steps: int = 100
    """steps that are counted"""
    warm_up: int = 10
    """steps before them that are not"""
    temperature: float = 1.0
    """0 takes the most probable token; 1 samples from the model's distribution"""
    output_json: Path | None = None
    """write every step's time to this file"""
    recording: tyro.conf.OmitArgPrefixes[Recording] = field(default_factory=Recording)
    options: EngineFlags = field(default_factory=EngineOptions)

    def run(self) -> int:
        least = {"context": 1, "batch_size": 1, "steps": 1, "warm_up": 0, "temperature": 0}
        wrong = too_small(self, least)
        if self.released and self.model is not None:
            wrong.append("give --model or --released, not both")
        wrong += self.recording.problems({"--output-json": self.output_json})
        if wrong:
            raise ValueError("; ".join(wrong))
        config = engine_config(self.options, self.model, is_released=self.released, decided=SIZED)
        warn_of_falsified(config.falsifies)
        if config.routing == "real":
            note(
                "routers see rows behind a filled cache: for loads as real texts have them, --routing recorded"
            )

        from flashstep.bench.decode import SHARES, Workload, measure
        from flashstep.bench.ledger import routing
        from flashstep.bench.results import as_json

        report = measure(
            config,
            Workload(
                context=self.context,
                batch_size=self.batch_size,
                steps=self.steps,
                warm_up=self.warm_up,
                temperature=self.temperature,
            ),
            shapes=released() if self.released else None,
            progress=note,
        )
        if self.output_json is not None:
            self.output_json.write_bytes(as_json(report))
        OUT.print(f"{report.subject['model']}, {report.subject['layout']}, on {report.origin.device}")
        for left_out in report.excluded:
            OUT.print(f"excluded: {left_out}")
        if report.steps:
            percentiles = ", ".join(f"P{100 * share:g} {report.step_us(share):,.0f} us" for share in SHARES)
            OUT.print(
                f"step: {percentiles}; {len(report.steps)} steps of {self.batch_size} requests, {self.context} to "
                f"{report.last_context:,.0f} tokens each\n"
                f"{report.tokens_a_step:.2f} tokens a step and request "
                f"({_acceptance(report)}), {report.tokens_a_second:,.1f} tokens/s in all; "
                f"{routing(report.falsified_by)}"
            )
        if report.replayed:
            made = ", ".join(f"{count} {how}" for how, count in report.replayed.items())
            OUT.print(f"recorded loads, by how they were made to fit the rows: {made}")
        tell_balance(report.balance)
        for fault in report.faults:
            OUT.print(f"fault: {fault}")
        self.recording.keep(report.entry())
        return 0 if report.complete else INTERRUPTED


def _acceptance(report: "DecodeReport") -> str:
    if not report.drafts:
        return "no drafts"
    synthetic = "synthetic acceptance" in report.falsified_by
    return f"{report.drafts} drafts, {'synthetic' if synthetic else 'real'} acceptance" + (
        "" if synthetic else ", which behind a filled cache says nothing"
    )


def tell_balance(balance: "Balance | None") -> None:
    """One line about expert loads, where they were recorded."""
    if balance is not None:
        OUT.print(
            f"balancedness over {balance.parts} parts: {balance.mean:.3f} a step ({min(balance.by_step):.3f} to "
            f"{max(balance.by_step):.3f}), {balance.window:.3f} over all {len(balance.by_step)}"
        )
