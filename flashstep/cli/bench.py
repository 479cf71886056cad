"""``flashstep bench``: measurements, one module each."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from flashstep.cli.bench_forward import BenchForward
from flashstep.cli.bench_latency import BenchLatency
from flashstep.cli.bench_pdl import BenchPdl

Measurement = (
    Annotated[BenchForward, tyro.conf.subcommand("forward")]
    | Annotated[BenchLatency, tyro.conf.subcommand("latency")]
    | Annotated[BenchPdl, tyro.conf.subcommand("pdl")]
)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure the engine on this device, against its floors."""

    measurement: Measurement

    def run(self) -> int:
        return self.measurement.run()
