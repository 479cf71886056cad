"""``flashstep bench probe``: the median step of one long stream, in this process or at a URL."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from flashstep.cli.bench_forward import engine_config
from flashstep.cli.extras import require_bench
from flashstep.cli.recording import EngineFlags, Recording
from flashstep.cli.terminal import INTERRUPTED, OUT, note, warn_of_falsified
from flashstep.config.engine_options import EngineOptions, changed_options
from flashstep.config.presets import released

if TYPE_CHECKING:
    from flashstep.bench.probe import ProbeReport

DECIDED = frozenset({"--max-num-seqs", "--max-model-len", "--enable-prefix-caching"})
FAILED = 1


@dataclass(frozen=True, kw_only=True)
class BenchProbe:
    """Decode one stream behind a fixed prompt; the score is the median wall time of a step.

    With drafts, fix the acceptance, or the arms of a comparison bring different tokens a step:
    --speculative-config '{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.51}'.
    """

    model: Path | None = None
    """checkpoint folder (released layout); without it the embedded tiny model"""
    released: bool = False
    """the released DeepSeek-V4.1-Flash's shapes, with dummy weights: mostly with --emulate"""
    url: str | None = None
    """probe an OpenAI-compatible server instead of an engine in this process"""
    served_model: str | None = None
    """with --url: the model to ask for; the default is the first that the server lists"""
    api_key: str | None = None
    """with --url: the key to send"""
    tokens: int = 6000
    """tokens to decode"""
    output_json: Path | None = None
    """write every step's time to this file"""
    recording: tyro.conf.OmitArgPrefixes[Recording] = field(default_factory=Recording)
    options: EngineFlags = field(default_factory=EngineOptions)

    def run(self) -> int:
        if wrong := [*self._problems(), *self.recording.problems({"--output-json": self.output_json})]:
            raise ValueError("; ".join(wrong))
        report = self._offline() if self.url is None else self._at(self.url)
        if self.output_json is not None:
            from flashstep.bench.results import as_json

            self.output_json.write_bytes(as_json(report))
        _tell(report)
        self.recording.keep(report.entry())
        if report.complete:
            return 0
        return INTERRUPTED if report.is_interrupted else FAILED

    def _problems(self) -> list[str]:
        wrong = []
        if self.tokens < 3:
            wrong.append(f"--tokens is {self.tokens}; it must be at least 3, for a step behind the first")
        if self.released and self.model is not None:
            wrong.append("give --model or --released, not both")
        if self.url is None:
            given = {"--served-model": self.served_model, "--api-key": self.api_key}
            wrong += [
                f"{flag} is of a server; give --url too" for flag, value in given.items() if value is not None
            ]
            return wrong
        local = [
            *changed_options(self.options),
            *(["--model"] if self.model else []),
            *(["--released"] if self.released else []),
        ]
        if local:
            wrong.append(f"{', '.join(local)}: the server at --url has its own; leave it out")
        return wrong

    def _offline(self) -> "ProbeReport":
        config = engine_config(self.options, self.model, is_released=self.released, decided=DECIDED)
        warn_of_falsified(config.falsifies)
        if config.speculative is not None and "synthetic acceptance" not in config.falsifies:
            note("acceptance is real: what another arm accepts may differ, and its tokens a step with it")
        from flashstep.bench.probe import probe

        return probe(config, tokens=self.tokens, shapes=released() if self.released else None, progress=note)

    def _at(self, url: str) -> "ProbeReport":
        require_bench("aiohttp")
        from flashstep.bench.load.client import without_user
        from flashstep.bench.probe_http import probe_url

        note(f"{self.tokens} tokens from {without_user(url)[0]}")
        return asyncio.run(probe_url(url, tokens=self.tokens, model=self.served_model, api_key=self.api_key))


def _tell(report: "ProbeReport") -> None:
    where = report.subject.get("url") or report.subject["layout"]
    OUT.print(f"{report.subject['model']}, {where}, on {report.origin.device}")
    if report.steps and report.decoded:
        synthetic = " (SYNTHETIC acceptance)" if "synthetic acceptance" in report.falsified_by else ""
        OUT.print(
            f"median step: {report.median_us:,.0f} us of {len(report.steps)} ({min(s.us for s in report.steps):,.0f} to "
            f"{max(s.us for s in report.steps):,.0f})\n"
            f"{report.tokens_a_step:.2f} tokens a step{synthetic}: "
            f"{report.us_a_token / 1000:,.3f} ms a token"
        )
    for fault in report.faults:
        OUT.print(f"fault: {fault}")
