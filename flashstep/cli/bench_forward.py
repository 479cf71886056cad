"""``flashstep bench forward``: steps of given shapes, timed and held against their physical floors."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import tyro
from rich.table import Table

from flashstep.bench.results import Measured, Report
from flashstep.cli.extras import require_bench
from flashstep.cli.flags import too_small
from flashstep.cli.model import resolve
from flashstep.cli.outputs import write
from flashstep.cli.recording import EngineFlags, Recording, told_options
from flashstep.cli.terminal import INTERRUPTED, OUT, note
from flashstep.config.engine import EngineConfig
from flashstep.config.engine_options import EngineOptions, changed_options
from flashstep.config.presets import released

RELEASED = Path("DeepSeek-V4.1-Flash")
SIZED = frozenset(  # by what is measured: how many requests of which length, in which memory
    {
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--max-model-len",
        "--kv-cache-memory-bytes",
        "--gpu-memory-utilization",
        "--num-gpu-blocks-override",
        "--enable-prefix-caching",
        "--fill-cache",
    }
)
DECIDED = SIZED | {"--prefix-hit-policy", "--enforce-eager", "--fill-cache-std"}


def engine_config(
    options: EngineOptions, model: Path | None, *, is_released: bool, decided: frozenset[str]
) -> EngineConfig:
    """The engine to measure; the released shapes come without a checkpoint, so with dummy weights.

    ``decided`` are the flags that the measurement sets itself: ``ValueError`` if one was given.
    """
    given = [flag for flag in changed_options(options) if flag in decided]
    if given:
        raise ValueError(f"{', '.join(given)}: what is measured decides that; leave it out")
    if is_released:
        return msgspec.structs.replace(options, load_format="dummy").checked().engine(RELEASED)
    return options.checked().engine(resolve(model))


@dataclass(frozen=True, kw_only=True)
class BenchForward:
    """Time steps of given shapes, take them apart by kernel, and hold them against their floors.

    A case is [N*]Q[@K][c][:D]: N requests of Q new tokens each behind K tokens of context. 8*6@131072 is a decoding step (up to
    a draft block and its newest token, or any Q with :D, the drafts proposed next); 8192@524288 ends a prompt (bounded replay:
    past the last KV source only the last rows run); 8192@524288c is a piece from a prompt's middle.
    """

    cases: tyro.conf.Positional[tuple[str, ...]] = ("6@1024",)
    """what to time"""
    model: Path | None = None
    """checkpoint folder (released layout); without it the embedded tiny model"""
    released: bool = False
    """the released DeepSeek-V4.1-Flash's shapes, with dummy weights: mostly with --emulate"""
    repeats: int = 30
    """timed runs of each case, fewer where these would take more than 3 seconds; all are written"""
    top: int = 25
    """kernels to show of each case"""
    json: Path | None = None
    """write raw times, parts and kernels to this file"""
    trace: Path | None = None
    """write a Chrome/Perfetto trace of the last case to this file"""
    svg: Path | None = None
    """draw each case's parts against their floors into this file (needs the bench extra)"""
    recording: tyro.conf.OmitArgPrefixes[Recording] = field(default_factory=Recording)
    options: EngineFlags = field(default_factory=EngineOptions)

    def run(self) -> int:
        outputs = {"--json": self.json, "--trace": self.trace, "--svg": self.svg}
        wrong = self.recording.problems(outputs) + too_small(self, {"repeats": 1})
        if self.released and self.model is not None:
            wrong.append("give --model or --released, not both")
        try:
            engine_config(self.options, self.model, is_released=self.released, decided=DECIDED)
        except ValueError as error:
            wrong.append(str(error))
        if wrong:
            raise ValueError("; ".join(wrong))
        config = engine_config(self.options, self.model, is_released=self.released, decided=DECIDED)
        self._check_picture(config)

        from flashstep.bench.forward import measure
        from flashstep.bench.offline import settings_of
        from flashstep.bench.results import as_json

        report = measure(
            config,
            self.cases,
            shapes=released() if self.released else None,
            repeats=self.repeats,
            trace=self.trace,
            progress=note,
        )
        if self.json is not None:
            write(self.json, as_json(report))
        self._show(report)
        self.recording.keep(
            report.entry(
                settings={"cases": list(self.cases), "repeats": self.repeats, **settings_of(config)},
                subject={"engine": told_options(self.options)},
                seed=config.seed,
                falsified_by=config.falsifies,
            )
        )
        return INTERRUPTED if report.faults else 0

    def _check_picture(self, config: EngineConfig) -> None:
        """Before anything long begins: ``ValueError`` where --svg could not be drawn at the end."""
        if self.svg is None:
            return
        require_bench("matplotlib")
        from flashstep.kernels.device import pick_device

        if pick_device(config.device).type != "cuda":
            raise ValueError(
                "--svg draws the parts of a step, and only a CUDA device tells them; leave it out"
            )

    def _show(self, report: Report) -> None:
        memory = report.memory
        OUT.print(f"{report.model}, {report.layout}, on {report.origin.device}")
        OUT.print(
            f"loaded in {memory.load_s:.1f} s; {memory.planned_bytes / 1e9:.2f} GB planned, {memory.loaded_bytes / 1e9:.2f} GB "
            f"loaded; at most {memory.peak_loading_bytes / 1e9:.2f} GB while loading, {memory.peak_bytes / 1e9:.2f} GB after"
        )
        for left_out in report.excluded:
            OUT.print(f"excluded: {left_out}")
        for case in report.cases:
            OUT.print(_summary(case))
            if case.parts:
                OUT.print(_parts(case))
                OUT.print(_kernels(case, top=self.top))
        for fault in report.faults:
            OUT.print(f"fault: {fault}")
        if self.svg is not None:
            from flashstep.bench.picture import draw

            draw(report, self.svg)


def _summary(case: Measured) -> str:
    samples = case.samples_us
    text = f"{case.case}: {case.us:,.0f} us ({min(samples):,.0f} to {max(samples):,.0f} of {len(samples)})"
    if case.floor_us is not None:
        text += f", floor {case.floor_us:,.0f} us, ratio {case.ratio:.2f}"
    text += f"; {case.touched_experts:.1f} experts a layer (uniform routing: {case.expected_experts:.1f})"
    if case.balancedness is not None:
        text += f", balancedness {case.balancedness:.3f}"
    if case.idle_share is not None:
        text += f"; {case.launches} launches, {100 * case.idle_share:.1f}% idle"
    return text


def _parts(case: Measured) -> Table:
    table = Table("part", title=case.case, title_justify="left")
    for name in ("us", "floor us", "ratio", "launches"):
        table.add_column(name, justify="right")
    for part in case.parts:
        table.add_row(
            part.name,
            "-" if part.us is None else f"{part.us:,.0f}",
            "-" if part.floor_us is None else f"{part.floor_us:,.0f}",
            "-" if part.ratio is None else f"{part.ratio:.2f}",
            str(part.launches),
        )
    return table


def _kernels(case: Measured, *, top: int) -> Table:
    table = Table("kernel", "account", "part")
    for name in ("calls", "us", "us a call", "share"):
        table.add_column(name, justify="right")
    whole = sum(kernel.us for kernel in case.kernels)
    for kernel in case.kernels[:top]:
        table.add_row(
            kernel.name.removeprefix("void ")[:48],
            kernel.account,
            kernel.part,
            str(kernel.calls),
            f"{kernel.us:,.0f}",
            f"{kernel.us / kernel.calls:,.1f}",
            f"{100 * kernel.us / whole:.1f}%",
        )
    return table
