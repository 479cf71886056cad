"""``flashstep bench``: measurements, one module each."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from flashstep.cli.bench_chain import BenchChain
from flashstep.cli.bench_compare import BenchCompare
from flashstep.cli.bench_decode import BenchDecode
from flashstep.cli.bench_forward import BenchForward
from flashstep.cli.bench_latency import BenchLatency
from flashstep.cli.bench_loads import BenchLoads
from flashstep.cli.bench_money import BenchMoney
from flashstep.cli.bench_pdl import BenchPdl
from flashstep.cli.bench_probe import BenchProbe
from flashstep.cli.bench_replay import BenchReplay
from flashstep.cli.bench_report import BenchReport
from flashstep.cli.bench_serve import BenchServe
from flashstep.cli.bench_test import BenchTest
from flashstep.cli.bench_traces import BenchTraces

Measurement = (
    Annotated[BenchForward, tyro.conf.subcommand("forward")]
    | Annotated[BenchLatency, tyro.conf.subcommand("latency")]
    | Annotated[BenchDecode, tyro.conf.subcommand("decode")]
    | Annotated[BenchProbe, tyro.conf.subcommand("probe")]
    | Annotated[BenchChain, tyro.conf.subcommand("chain")]
    | Annotated[BenchPdl, tyro.conf.subcommand("pdl")]
    | Annotated[BenchLoads, tyro.conf.subcommand("loads")]
    | Annotated[BenchReplay, tyro.conf.subcommand("replay")]
    | Annotated[BenchServe, tyro.conf.subcommand("serve")]
    | Annotated[BenchTraces, tyro.conf.subcommand("traces")]
    | Annotated[BenchCompare, tyro.conf.subcommand("compare")]
    | Annotated[BenchReport, tyro.conf.subcommand("report")]
    | Annotated[BenchMoney, tyro.conf.subcommand("money")]
    | Annotated[BenchTest, tyro.conf.subcommand("test")]
)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure the engine on this device, against its floors."""

    measurement: Annotated[Measurement, tyro.conf.arg(name="")]  # no "measurement." in the names of groups

    def run(self) -> int:
        return self.measurement.run()
